"""Real ranks of this machine: what they send and compute is what was planned, and a rank that fails says why in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright import estimate
from trainwright.measure.real import GRADIENT_TOLERANCE, LOSS_TOLERANCE, loss_rows, message_rows, time_rows
from trainwright.train.ranks import RankFailed, run_ranks
from trainwright.train.verify import alone, in_fp32

pytestmark = pytest.mark.slow  # real runs, timed

MODEL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 256}
TRAINING = {"seq_len": 32, "global_batch_size": 8, "precision": "fp32"}
CPU = {"id": "cpu", "cc_or_arch": "cpu", "fp32": 0.1, "mem_label_gb": 8, "mem_bw_gbs": 10, "link": "loopback"}
STRATEGIES = {
    "ddp": {"framework": "ddp", "sharding": "none", "micro_batch_size": 2},
    "zero3": {"framework": "fsdp2", "sharding": "zero3", "micro_batch_size": 4},
    "zero2": {"framework": "fsdp2", "sharding": "zero2", "micro_batch_size": 4, "recompute": "full"},
}


def document(strategy: dict, gpus: int = 2) -> dict:
    cluster = {"gpu": CPU, "nodes": 1, "gpus_per_node": gpus}
    return {"model": MODEL, "cluster": cluster, "training": TRAINING, "strategy": strategy}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """One start of one rank and one of two for every case of this file."""
    kept = str(tmp_path_factory.mktemp("kept") / "gradients")
    request = {"catalog_files": [], "device": "cpu", "kept": kept, "losses": 3, "clip": 0.0, "timeout_s": 60.0}
    single = document(STRATEGIES["ddp"])
    single = {**alone({**single, "strategy": {}}), "cluster": {**single["cluster"], "gpus_per_node": 1}}
    one = run_ranks("trainwright.train.measure_runs", {**request, "documents": [single], "reference": True}, 1, 240.0)[0]
    documents = [in_fp32(document(s)) for s in STRATEGIES.values()]
    asked = {**request, "documents": documents, "reference": False, "messages": True, "rounds": 1}
    many = run_ranks("trainwright.train.measure_runs", asked, 2, 240.0)
    return {"one": one, **dict(zip(STRATEGIES, many, strict=True))}


@pytest.mark.parametrize("name", STRATEGIES)
def test_losses_and_gradients_of_one_device(found: dict, name: str) -> None:
    rows = loss_rows(found["one"], found[name])
    assert len(rows) == 4
    assert all(r.within for r in rows), rows
    assert max(abs(r.error or 0) for r in rows[:3]) <= LOSS_TOLERANCE
    assert rows[3].measured <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_collective_is_the_plan_s(found: dict, name: str) -> None:
    rows = message_rows(estimate(document(STRATEGIES[name])), found[name]["messages"])
    assert rows
    assert all(r.within for r in rows), rows


def test_steps_take_time(found: dict) -> None:
    names = list(STRATEGIES)
    rows, summary = time_rows(names, [estimate(document(STRATEGIES[n])) for n in names], [found[n] for n in names])
    assert summary["layouts"] == 3
    assert all(r.measured > 0 for r in rows)
    assert all(min(found[n]["pulse"]) > 0 for n in names)  # taken beside each


def test_what_cannot_run_is_named_and_the_rest_runs() -> None:
    broken = document({**STRATEGIES["ddp"], "dp": 4}, 4)
    asked = {"documents": [broken, document(STRATEGIES["ddp"], 1)], "catalog_files": [], "device": "cpu", "messages": True}
    first, second = run_ranks("trainwright.train.measure_runs", asked, 1, 120.0)
    assert "4 processes" in first["error"]
    assert "messages" in second


def test_a_rank_that_fails_says_why() -> None:
    with pytest.raises(RankFailed, match="rank 0: KeyError: 'documents'"):
        run_ranks("trainwright.train.measure_runs", {"device": "cpu"}, 1, 120.0)


def test_ranks_that_do_not_answer_are_ended(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(100)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(RankFailed, match="did not answer"):
            run_ranks("sleeper", {}, 2, 1.0)
