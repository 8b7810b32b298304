"""Laws from measured seconds: what is put in comes out, and the planner prices plans of the machine that the profile describes."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import tomli_w

import trainwright as tw
from trainwright.errors import SpecError
from trainwright.measure.calibrate import read_profile
from trainwright.measure.machine import curves_of, fit_attention, fit_ramps, fit_tiles, machine_of, overlap_of
from trainwright.measure.real import time_rows

RATE, BANDWIDTH = 50e9, 10e9
SHAPES = [(m, n, k) for m in (64, 256, 1024) for n in (64, 512) for k in (128, 1024)]


def product_seconds(m: float, n: float, k: float) -> float:
    return 2 * m * n * k / RATE * (1 + 32 / m) * (1 + 16 / n)


def raw(ranks: int = 2) -> dict:
    """A machine of 50 GFLOP/s and 10 GB/s a rank."""
    element = 4 * 1024.0 * 768
    row = [1024.0 * 768, 2 * element / BANDWIDTH, 3 * element / BANDWIDTH]
    names = ("norm", "rms", "activation", "multiply", "gated", "add", "rope", "embedding", "bias", "cast")
    return {
        "device": {"kind": "cpu", "ranks": ranks, "threads": 1, "software": "torch 2", "name": "a processor", "memory_bytes": 8 * 10**9},
        "launch_s": 5e-6,
        "copy_bytes_per_s": BANDWIDTH,
        "matmul": {"fp32": [[m, n, k, product_seconds(m, n, k)] for m, n, k in SHAPES]},
        "attention": {"fp32": [[s, 64, 8, 2 * 8 * s * s * 64 / 20e9, 3 * 2 * 8 * s * s * 64 / 20e9] for s in (128, 512)]},
        "elementwise": {"fp32": dict.fromkeys(names, row)},
        "loss": {"fp32": [1e6, 20e6 / BANDWIDTH]},
        "optimizer": {"parameters": 1e6, "step_s": 28e6 / BANDWIDTH, "clip_s": 8e6 / BANDWIDTH},
        "collectives": [[kind, 2, size, 1e-4 + size / 1e9] for kind in ("all_reduce", "all_gather") for size in (4096, 2**20, 2**22)],
        "overlap": {"work_s": 0.3, "sent_s": 0.2, "both_s": 0.4},
    }


def write(folder: Path, found: dict | None = None) -> str:
    path = folder / "machine.toml"
    path.write_text(machine_of(found or raw()).to_toml(), encoding="utf-8")
    return str(path)


def run(cluster: str = "2xthis-cpu", **strategy: object) -> dict:
    model = {"model_type": "gpt2", "n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 256, "vocab_size": 1024}
    training = {"seq_len": 256, "global_batch_size": 16, "precision": "fp32"}
    return {"model": model, "cluster": cluster, "training": training, "strategy": {"framework": "ddp", "sharding": "none", **strategy}}


def test_the_law_that_was_put_in_comes_out() -> None:
    found = fit_ramps(raw()["matmul"]["fp32"], "fp32", None, BANDWIDTH)
    assert found.mean_error < 0.02
    assert found.constants["flops"] == pytest.approx(RATE, rel=0.02)
    assert (found.constants["m_half"], found.constants["n_half"], found.constants["k_half"]) == (32, 16, 0)


def test_attention_and_its_backward() -> None:
    found = fit_attention(raw()["attention"]["fp32"], "fp32")
    assert found.mean_error < 0.02
    assert found.constants["backward"] == pytest.approx(3)


def test_tiles_where_a_gpu_is_known() -> None:
    """On a card of the catalogue the law of tiles is tried too, and kept where it fits better."""
    from trainwright.catalog.gpus import load_gpu
    from trainwright.cost.kernels import Rates, constants, matmul_seconds

    gpu = load_gpu("h100")
    rate = Rates(600e12, 1.0, 1.0, 3e12, gpu.compute_units, 1.0, 1.0, 1.0, constants()["matmul"])
    shapes = np.array([(m, n, k) for m in (2048, 8192) for n in (1024, 4096) for k in (4096, 8192)], dtype=float)
    seconds = matmul_seconds(*shapes.T, np.ones(len(shapes)), rate, "bf16")
    points = [[*s, t] for s, t in zip(shapes.tolist(), seconds.tolist(), strict=True)]
    found = fit_tiles(points, "bf16", gpu, 3e12)
    assert found.constants["flops"] == pytest.approx(600e12, rel=0.01)
    assert found.mean_error < fit_ramps(points, "bf16", gpu, 3e12).mean_error


def test_a_message_behind_work() -> None:
    assert overlap_of({"work_s": 0.3, "sent_s": 0.2, "both_s": 0.4})["residual"] == pytest.approx(0.5)
    assert overlap_of({"work_s": 0.3, "sent_s": 0.2, "both_s": 0.3})["residual"] == 0.05
    assert overlap_of({"work_s": 0.3, "sent_s": 0.2, "both_s": 0.9})["residual"] == pytest.approx(3.0)


def test_what_sending_costs_is_written_read_and_told(tmp_path: Path) -> None:
    line = [2e-3, 5e-10]
    host = {"groups": {"zero3": {"each": line, "reduce": line}}, "tp": {"product_s": 1e-3, "all_gather": line}, "update_s": 5e-5}
    sharded = run(framework="fsdp2", sharding="zero3")
    (tmp_path / "with").mkdir()
    profiles = write(tmp_path), write(tmp_path / "with", raw() | {"host": host})
    without, found = (tw.estimate(sharded, catalog_files=(p,)).step_s for p in profiles)
    assert found - without > 5 * (2e-3 + 2e-3)  # four layers and the ends, gathered and reduced
    told = {row["measured"]: row["found"] for row in machine_of(raw() | {"host": host}).rows()}
    assert told["a group of FSDP2 (zero3), each"] == "2,000 us + 0.50 ns a byte"
    assert told["host, tp product"] == "1,000 us"
    assert told["host, tp all-gather"] == "2,000 us + 0.50 ns a byte"


def test_predicted_steps_keep_pace_with_a_machine_that_slowed_down(tmp_path: Path) -> None:
    """Twice as long for the same work as when it was calibrated: a step that was to take 2 s takes 4."""
    machine = machine_of(raw() | {"host": {"pulse_s": 0.05}})
    assert machine.pulse_s == 0.05
    assert machine_of(raw()).pulse_s is None
    plan = tw.estimate(run(), catalog_files=(write(tmp_path, raw() | {"host": {"pulse_s": 0.05}}),))
    assert plan.step_s == tw.estimate(run(), catalog_files=(write(tmp_path),)).step_s  # the pulse itself prices nothing
    found = [{"seconds": [9.0, 2 * plan.step_s], "pulse": [0.5, 0.1]}, {"seconds": [2 * plan.step_s], "pulse": [0.1]}]
    for calibrated, expected in ((0.05, 2 * plan.step_s), (None, plan.step_s)):
        rows, summary = time_rows(["a", "b"], [plan, plan], found, calibrated)
        assert [r.predicted for r in rows] == [pytest.approx(expected)] * 2
        assert summary["pace"] == expected / plan.step_s


def test_curves_never_fall() -> None:
    (curve,) = curves_of([["all_reduce", 2, 1024, 3e-4], ["all_reduce", 2, 64, 4e-4], ["all_reduce", 2, 4096, 5e-4]])
    assert curve["bytes"] == [64, 1024, 4096]
    assert curve["seconds"] == [4e-4, 4e-4, 5e-4]


def test_a_plan_of_this_machine_has_an_estimate(tmp_path: Path) -> None:
    profile = write(tmp_path)
    found = tw.estimate(run(), catalog_files=(profile,))
    flops = found.flops_convention("megatron")["flops_per_step"]
    assert found.step_s > flops / 2 / RATE  # two ranks, no faster than their products
    assert found.step_s < 3 * flops / 2 / RATE
    assert found.capacity_bytes == pytest.approx(8e9, rel=0.01)
    assert tw.estimate(run("1xthis-cpu"), catalog_files=(profile,)).step_s > 1.7 * found.step_s
    again = tw.estimate(run(micro_batch_size=8, recompute="full"), catalog_files=(profile,))
    assert 1.2 < again.step_s / tw.estimate(run(micro_batch_size=8), catalog_files=(profile,)).step_s < 1.4


def test_measured_curves_price_the_collectives(tmp_path: Path) -> None:
    from trainwright.catalog.load import build_cluster
    from trainwright.cost.collectives import collective_time
    from trainwright.spec.run import validate

    cluster = build_cluster(validate(run()).cluster, (write(tmp_path),))
    assert collective_time("all_reduce", 2**20, cluster, 2) == pytest.approx(1e-4 + 2**20 / 1e9)
    assert collective_time("all_gather", 2**23, cluster, 2) == pytest.approx(1e-4 + 2**23 / 1e9, rel=1e-6)
    assert collective_time("send_recv", 2**20, cluster, 2) > 0  # not measured: the law


def test_the_slower_machine_is_predicted_slower(tmp_path: Path) -> None:
    slow = copy.deepcopy(raw())
    slow["matmul"]["fp32"] = [[m, n, k, 3 * s] for m, n, k, s in slow["matmul"]["fp32"]]
    (tmp_path / "slow").mkdir()
    a, b = (tw.estimate(run(), catalog_files=(write(p, r),)).step_s for p, r in ((tmp_path, raw()), (tmp_path / "slow", slow)))
    assert 2 < b / a < 3.2


def test_one_file_is_profile_and_catalogue(tmp_path: Path) -> None:
    assert read_profile(write(tmp_path)).factors == ()


@pytest.mark.parametrize(
    ("measured", "match"),
    [
        ({"kernels": {"matmuls": {}}}, "matmul"),
        ({"kernels": {"matmul": {"fp32": {"flops": -1}}}}, "measured"),
        ({"collective": [{"kind": "all_reduce", "ranks": 2, "bytes": [2.0, 1.0], "seconds": [1.0, 1.0]}]}, "rising"),
        ({"collective": [{"kind": "gossip", "ranks": 2, "bytes": [1.0], "seconds": [1.0]}]}, "collective"),
        ({"collective": [{"kind": "all_reduce", "ranks": 1, "bytes": [1.0], "seconds": [1.0]}]}, "ranks"),
        ({"surprise": 1}, "unknown"),
    ],
)
def test_a_broken_profile_is_one_line(tmp_path: Path, measured: dict, match: str) -> None:
    gpu = {"id": "x", "cc_or_arch": "cpu", "fp32": 0.1, "mem_label_gb": 8, "mem_bw_gbs": 10, "measured": measured}
    path = tmp_path / "broken.toml"
    path.write_text(tomli_w.dumps({"gpu": [gpu]}), encoding="utf-8")
    with pytest.raises(SpecError, match=match):
        tw.estimate(run("2xx"), catalog_files=(str(path),))
