"""Every study of the registry: runs, is exact, counts what the formula says; its command prints tables and JSON, and says in one line what is wrong."""

from __future__ import annotations

import inspect
import json
import shlex

import pytest

from trainwright import simulate
from trainwright.cli import main
from trainwright.errors import SpecError

QUICK = {"mixed-precision": {"steps": 30}, "pipeline": {"layers": 3, "steps": 2}, "offload": {"steps": 1}, "accumulation": {"steps": 2}}


def command(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    out, err = capsys.readouterr()
    return stop.value.code, out, err


@pytest.mark.parametrize("name", simulate.STUDIES)
def test_a_study_is_exact_and_counts_what_the_formula_says(name):
    report = simulate.run(name, **QUICK.get(name, {}))
    assert report.title
    assert report.tables
    assert report.notes
    assert report.figures.get("bytes_equal_formula", True) is True
    for error in report.figures.get("relative_error", {}).values():
        assert error < 1e-12
    assert report.figures.get("replica_spread", 0) == 0
    assert report.text()
    for table in report.tables:
        assert len({tuple(row) for row in table.rows}) == 1, "rows of a table have the same columns"


@pytest.mark.parametrize("name", [n for n, s in simulate.STUDIES.items() if "ranks" in inspect.signature(s.run).parameters])
def test_a_world_of_one_is_one_device(name):
    report = simulate.run(name, ranks=1, **({} if name == "collectives" else {"steps": 1}))
    assert name == "offload" or report.figures.get("bytes_sent", 0) == 0
    assert report.figures["bytes_equal_formula"]


@pytest.mark.parametrize("name", simulate.STUDIES)
def test_its_help_has_an_example_that_is_this_command(name, capsys):
    study = simulate.STUDIES[name]
    status, out, _ = command(capsys, "simulate", name, "--help")
    assert status == 0
    assert " ".join(out.split()).count(" ".join(study.example.split()))
    assert shlex.split(study.example)[:3] == ["trainwright", "simulate", name]


def test_the_function_of_the_same_word():
    for name in simulate.STUDIES:
        assert getattr(simulate, name.replace("-", "_")) is simulate.STUDIES[name].run


def test_json_is_one_document(capsys):
    status, out, _ = command(capsys, "simulate", "tensor-parallel", "--ranks", "2", "--steps", "1", "--json")
    document = json.loads(out)
    assert status == 0
    assert document["figures"]["relative_error"]["gradients"] < 1e-12


def test_tables_for_people(capsys):
    status, out, _ = command(capsys, "simulate", "collectives", "--ranks", "3", "--elements", "7")
    assert status == 0
    assert "all-reduce" in out
    assert "NO" not in out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("tensor-parallel --ranks 9", "8 key-value heads"),
        ("data-parallel --ranks 12 --batch 10", "10 sequences are fewer than 12"),
        ("pipeline --schedule 1f1", "nearest: 1f1b"),
        ("pipeline --schedule dualpipe --microbatches 4", "dualpipe needs"),
        ("context-parallel --ranks 4 --length 5", "5 tokens are fewer"),
        ("expert-parallel --ranks 16 --experts 8 --batch 16", "8 experts over ep = 16"),
        ("fsdp --zero 4", "4 is outside of 0 to 3"),
        ("fsdp --ranks 4 --replicas 3", "nearest: 1, 2, 4"),
        ("combined --recompute some", "nearest: "),
        ("data-parallel --ranks 0", "0 is outside"),
        ("data-parallel --model dens", "nearest: dense"),
        ("data-parallel --batch 100000", "outside"),
        ("datta-parallel", "data-parallel"),
        ("mixed-precision --steps 0", "0 is outside"),
        ("offload --gpus 0", "gpus"),
        ("combined --layers 1000000000000", "layers"),
        ("recompute --layers 0", "layers"),
        ("offload --tflops inf", "flops_per_s"),
        ("offload --link 0", "link"),
        ("mixed-precision --rate nan", "rate"),
        ("mixed-precision --tokens -1", "tokens"),
        ("data-parallel --seed -1", "seed"),
        ("tensor-parallel --ffn 100000000", "parameters are more than"),
        ("data-parallel --steps 999", "more than a simulation takes"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(capsys, words, reason):
    status, out, err = command(capsys, "simulate", *shlex.split(words))
    assert status == 2
    assert out == ""
    assert reason in err
    assert err.count("\n") == 1


def test_a_part_of_the_lesson(capsys):
    status, out, _ = command(capsys, "lesson", "--only", "pipeline", "--json")
    assert status == 0
    assert [r["title"] for r in json.loads(out)] == ["3. Pipeline: 32 layers in 4 stages, forward as long as backward"]
    status, _, err = command(capsys, "lesson", "--only", "exercise 9")
    assert status == 2
    assert "exercise" in err


def test_an_unknown_study():
    with pytest.raises(SpecError, match="nearest: fsdp"):
        simulate.run("fsdpp")


# --- what each shows ---------------------------------------------------------------------------------------------------------------------------


def test_unequal_shards_differ_and_equal_ones_do_not():
    assert simulate.data_parallel(ranks=3, batch=10, steps=1).figures["gradient_error_mean_of_means"] > 1e-3
    assert simulate.data_parallel(ranks=5, batch=10, steps=1).figures["gradient_error_mean_of_means"] < 1e-13


def test_buckets_are_fewer_when_larger():
    small, large = (simulate.data_parallel(steps=1, bucket_bytes=size).figures["all_reduces_per_step"] for size in (1, 10**9))
    assert large == 1
    assert small > 10


def test_traffic_of_the_zero_stages_in_units():
    assert list(simulate.fsdp(steps=1).figures["units"].values()) == pytest.approx([2, 2, 2, 3], rel=1e-3)
    many = simulate.fsdp(steps=1, microbatches=2).figures["units"]
    assert list(many.values()) == pytest.approx([2, 2, 3, 6], rel=1e-3)
    assert simulate.fsdp(steps=1, reshard_after_forward=False).figures["units"]["ZeRO-3 / FSDP"] == pytest.approx(2, rel=1e-3)


def test_memory_of_the_zero_stages():
    states = simulate.fsdp(ranks=4, steps=1).figures["states"]
    whole = states["none (DDP)"]
    quarters = {
        name: {kind for kind in ("parameters", "gradients", "optimizer") if held[kind] == pytest.approx(whole[kind] / 4, rel=0.01)}
        for name, held in states.items()
    }
    assert quarters == {
        "none (DDP)": set(),
        "ZeRO-1": {"optimizer"},
        "ZeRO-2": {"optimizer", "gradients"},
        "ZeRO-3 / FSDP": {"optimizer", "gradients", "parameters"},
    }


def test_the_zigzag_balances_causal_attention():
    figures = simulate.context_parallel(ranks=4, length=32, steps=1).figures
    assert figures["pairs"] == 32 * 33 // 2
    assert figures["pairs_in_time"]["zigzag"] < 1.15 * figures["ideal"]
    assert figures["pairs_in_time"]["contiguous"] > 1.5 * figures["ideal"]


def test_sequence_parallelism_keeps_less():
    rows = simulate.sequence_parallel(ranks=4, steps=1).tables[0].rows
    kept = [row["activations kept, most of a rank (bytes)"] for row in rows]
    assert kept[1] < 0.6 * kept[0]


def test_capacity_drops_what_is_over():
    full, tight = (simulate.expert_parallel(steps=1, capacity_factor=c).figures for c in (0.0, 0.5))
    assert full["dropped"] == 0
    assert tight["dropped_share"] >= 0.4


def test_every_schedule_at_once():
    figures = simulate.pipeline(schedule="all", ranks=2, microbatches=4, batch=4, length=4, layers=2, steps=1).figures
    assert figures["largest_relative_error"] < 1e-12
    assert figures["executed"] + len(figures["refused"]) >= 13
