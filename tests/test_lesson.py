"""The lesson: its own numbers, exactly; its errors named with the right figure; its exercises against published runs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from trainwright import lesson
from trainwright.errors import SpecError
from trainwright.lesson import costs, demonstrations, exercises

WANT = json.loads((Path(__file__).parent / "data" / "lesson.json").read_text())


def same(got, want):
    if isinstance(want, bool | str) or want is None:
        return got == want
    if isinstance(want, int | float):
        return got == pytest.approx(want, rel=1e-12)
    if isinstance(want, dict):
        return all(key in got and same(got[key], value) for key, value in want.items())
    return len(got) == len(want) and all(same(a, b) for a, b in zip(got, want))


# --- the five functions ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def regression():
    random = np.random.RandomState(42)
    data, weight = random.randn(64, 32), random.randn(32, 16)
    return data, lambda batch: (np.mean((batch @ weight) ** 2), 2 * batch.T @ (batch @ weight) / len(batch))


@pytest.mark.parametrize("want", WANT["data_parallel"], ids=lambda w: f"{w['rows']} rows on {w['num_gpus']}")
def test_data_parallelism(want, regression):
    data, model_fn = regression
    loss, gradient = lesson.simulate_data_parallelism(data[: want["rows"]], want["num_gpus"], model_fn)
    assert same(
        [loss, np.linalg.norm(gradient), gradient[0, 0], list(gradient.shape)],
        [want["loss"], want["grad_norm"], want["grad_0_0"], want["shape"]],
    )


@pytest.mark.parametrize("want", WANT["tensor_parallel"], ids=lambda w: str(w["num_gpus"]))
def test_tensor_parallelism(want):
    x, weight = np.random.RandomState(7).randn(4, 64), np.random.RandomState(8).randn(64, 48)
    output, error = lesson.simulate_tensor_parallelism(x, weight, want["num_gpus"])
    assert same([list(output.shape), output.sum(), output[0, 0], output[-1, -1]], [want["shape"], want["sum"], want["first"], want["last"]])
    assert 0 <= error <= want["max_error_at_most"]


def test_tensor_parallelism_refuses_what_does_not_divide():
    with pytest.raises(SpecError, match=r"48 columns do not divide over 5 GPUs \(nearest: 3, 4, 6"):
        lesson.simulate_tensor_parallelism(np.ones((2, 4)), np.ones((4, 48)), 5)


@pytest.mark.parametrize("want", WANT["pipeline"], ids=lambda w: str(w["args"]))
def test_pipeline_parallelism(want):
    layers, stages, micro = want["args"]
    timeline, total, bubble = lesson.simulate_pipeline_parallelism(layers, stages, micro)
    assert (total, len(timeline)) == (want["total_time"], want["entries"])
    assert bubble == pytest.approx(want["bubble_fraction"], abs=1e-15)
    assert list(timeline[stages - 1, 0, "fwd"]) == want["last_stage_first_fwd"]
    assert list(timeline[0, 0, "bwd"]) == want["first_stage_last_bwd"]


def test_the_timeline_overlaps_on_no_stage_and_waits_for_its_inputs():
    timeline, total, _ = lesson.simulate_pipeline_parallelism(12, 3, 5)
    for stage in range(3):
        times = sorted(span for (s, _, _), span in timeline.items() if s == stage)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(times))
    for micro in range(5):
        assert all(timeline[s, micro, "fwd"][0] >= timeline[s - 1, micro, "fwd"][1] for s in (1, 2))
        assert all(timeline[s, micro, "bwd"][0] >= timeline[s + 1, micro, "bwd"][1] for s in (0, 1))
    assert max(end for _, end in timeline.values()) == total


@pytest.mark.parametrize("want", WANT["memory"], ids=lambda w: json.dumps(w["kwargs"]))
def test_memory_calculator(want):
    assert same(lesson.memory_calculator(**want["kwargs"]), want["result"])


@pytest.mark.parametrize("want", WANT["precision"], ids=lambda w: str(w["params_billions"]))
def test_mixed_precision_comparison(want):
    assert same(lesson.mixed_precision_comparison(want["params_billions"]), want["result"])


@pytest.mark.parametrize("name", WANT["tables"])
def test_tables(name):
    assert same(lesson.tables()[name], WANT["tables"][name])


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: lesson.simulate_data_parallelism(np.ones((2, 1)), 3, lambda b: (0.0, b)), "2 rows are fewer than 3"),
        (lambda: lesson.simulate_data_parallelism(np.ones((2, 1)), 0, lambda b: (0.0, b)), "whole number"),
        (lambda: lesson.simulate_pipeline_parallelism(4, 8, 2), "4 layers are fewer than 8 stages"),
        (lambda: lesson.memory_calculator(7, sharding="zero4"), "nearest: zero"),
        (lambda: lesson.memory_calculator(7, optimizer="adm"), "nearest: adam"),
        (lambda: lesson.memory_calculator(-7), "above zero"),
        (lambda: lesson.memory_calculator(float("nan")), "above zero"),
        (lambda: lesson.mixed_precision_comparison(0), "above zero"),
    ],
)
def test_wrong_input_names_the_reason(call, reason):
    with pytest.raises(SpecError, match=reason):
        call()


# --- demonstrations ----------------------------------------------------------------------------------------------------------------------------

CORRECTIONS = {  # part: what its corrections must say
    "problem": ["112 GB", "285 MB", "956 MB"],
    "table 1": ["16 bytes a parameter", "81 cards"],
    "data parallel": ["29.8345", "29.1306"],
    "tensor parallel": ["also splits rows", "450 each way"],
    "pipeline": ["(N-1)/(M+N-1)", "15.8 %", "18.75 %", "does not shrink the bubble"],
    "memory": ["140 GB a GPU, not 105", "1.5 times", "need more than states"],
    "precision": ["98 GB", "112 GB", "not 84"],
}


@pytest.fixture(scope="module")
def shown():
    smaller = {
        "tensor parallel": lambda: demonstrations.tensor_parallelism(width=256),
        "precision": lambda: demonstrations.precision(steps=12),
    }
    return {name: perform() for name, perform in {**demonstrations.DEMONSTRATIONS, **smaller}.items()}


@pytest.mark.parametrize("part", CORRECTIONS)
def test_where_the_lesson_errs_a_line_gives_the_right_figure(shown, part):
    lines = shown[part].corrections
    assert all("\n" not in line for line in lines)
    for words in CORRECTIONS[part]:
        assert any(words in line for line in lines), words


def test_demonstrations_show_the_lessons_numbers(shown):
    assert [r["loss"] for r in shown["data parallel"].figures["even"]] == pytest.approx(
        [w["loss"] for w in WANT["data_parallel"][:4]], rel=1e-12
    )
    times = {tuple(w["args"]): w["total_time"] for w in WANT["pipeline"]}
    for row in shown["pipeline"].figures["rows"]:
        assert row["lesson: time"] == times[32, 4, row["microbatches"]] == row["1F1B: time"]
        assert row["idle/total"] == pytest.approx(3 / (row["microbatches"] + 3))
        assert row["peak 1F1B"] == min(4, row["microbatches"])
    assert shown["table 1"].figures["h100s_for_405b"] == {"lesson": 61, "with masters": 81}
    assert all(row["largest error"] < 1e-11 and row["by rows: error"] < 1e-11 for row in shown["tensor parallel"].figures["rows"])


def test_parts_in_the_lessons_order():
    names = list(lesson.parts())
    assert names[-5:] == [f"exercise {i}" for i in range(1, 6)]
    assert (
        names.index("data parallel")
        < names.index("tensor parallel")
        < names.index("pipeline")
        < names.index("memory")
        < names.index("precision")
    )


# --- exercises ---------------------------------------------------------------------------------------------------------------------------------


def test_exercise_1_checkpointing_saves_memory_for_a_third_more_computation():
    none, one = exercises.checkpointed_activations(32, 4096, 2048), exercises.checkpointed_activations(32, 4096, 2048, 1)
    assert none["bytes"] == 34 * 2048 * 4096 * 32
    assert one == {"bytes": (2 * 32 + 34) * 2048 * 4096, "extra_compute": 1 / 3}
    report = exercises.checkpointing()
    by_mode = {row["recompute"]: row for row in report.figures["measured"]}
    assert by_mode["full"]["extra block forwards"] == 1
    assert (
        by_mode["full"]["kept after forward (bytes)"]
        < by_mode["selective"]["kept after forward (bytes)"]
        < by_mode["none"]["kept after forward (bytes)"]
    )
    assert all(row["kept after forward (bytes)"] == row["formula"] and row["difference of gradients"] == 0 for row in by_mode.values())
    with pytest.raises(SpecError, match="every"):
        exercises.checkpointed_activations(32, 4096, 2048, 33)


def test_exercise_2_1f1b_has_the_naive_bubble_and_half_of_its_memory():
    naive, fill, one = exercises.one_forward_one_backward().figures["rows"]
    assert (naive["bubble idle/total"], fill["bubble idle/total"], one["bubble idle/total"]) == pytest.approx((3 / 4, 3 / 11, 3 / 11))
    assert (fill["peak (microbatches)"], one["peak (microbatches)"]) == (8, 4)
    assert fill["time (microbatch forwards)"] == one["time (microbatch forwards)"] == 22


def test_exercise_3_accumulation_sends_k_times_less_for_the_same_gradients():
    figures = exercises.gradient_accumulation(4).figures
    assert figures["traffic_ratio"] == 4
    assert figures["relative_error"]["gradients"] < 1e-12
    assert figures["gradient_error_mean_of_means"] > 1e-3


def test_exercise_4_costs_of_published_runs():
    llama = costs.training_cost(405e9, 15.6e12, "h100", 16384, "3d")
    assert llama["flops"] == pytest.approx(3.8e25, rel=0.01)  # the paper's own figure
    assert llama["cost_usd"] == pytest.approx(100e6, rel=0.10)
    assert llama["gpu_hours"] == pytest.approx(30.84e6, rel=0.15)
    deepseek = costs.training_cost(37e9, 14.8e12, "h800", 2048, "moe")
    assert deepseek["cost_usd"] == pytest.approx(5.576e6, rel=0.10)
    assert deepseek["gpu_hours"] == pytest.approx(2.664e6, rel=0.05)
    with pytest.raises(SpecError, match="nearest"):
        costs.training_cost(7e9, 1e12, "h10")
    with pytest.raises(SpecError, match="utilization"):
        costs.training_cost(7e9, 1e12, utilization=1.5)


def test_exercise_5_the_optimizer_of_70b_needs_nvme():
    where = {row["where"]: row for row in exercises.offload_plan(70e9, 4, 80e9, exercises.Host())}
    assert [row["fits"] for row in where.values()] == ["no", "no", "yes", "yes"]
    assert where["optimizer in host memory (ZeRO-Offload)"]["host GB"] == pytest.approx(980)
    report = exercises.zero_offload()
    slower = [row["slower by"] for row in report.figures["rows"]]
    assert slower == sorted(slower, reverse=True)
    fast, slow = report.figures["tokens_for_50_to_30_percent"]
    assert 10_000 < fast < slow < 1_000_000


def test_the_planner_stands_beside_and_its_refusal_is_said():
    class Answer:
        def to_dict(self):
            time = {"step_s": 10.0, "breakdown": {"compute": 7.0, "bubble": 2.0, "dp_comm": 1.0, "other": 0.0}}
            strategy = {"framework": "megatron", "schedule": "1f1b"}
            return {"run": {"cost_usd": 111e6}, "time": time, "throughput": {"mfu": 0.4}, "spec": {"strategy": strategy}}

    asked = []

    def planner(spec):
        asked.append(spec["model"])
        if spec["model"] == "deepseek-v3":
            raise SpecError("no such thing", "strategy")
        return Answer()

    report = exercises.cost(planner)
    assert asked == ["llama-3.1-405b", "deepseek-v3"]
    assert [row["planner $M"] for row in report.figures["rows"]] == [111, None]
    assert any("no such thing" in note for note in report.notes)
    assert any("bubble 20%, dp_comm 10%" in note for note in report.notes)
