"""Messages of a step: PyTorch's own, recorded, and the closed form of every strategy."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright import SpecError
from trainwright.cost.table import PlanTable
from trainwright.cost.traffic import traffic
from trainwright.cost.traffic.buckets import filled
from trainwright.resolve import resolve
from trainwright.spec.plan import ParallelPlan, Structure
from trainwright.spec.run import validate

from .traffic_runs import HIDDEN, LAYERS, LLAMA, TINY_MOE, messages, ring_bytes, run, sent

ROWS = [json.loads(line) for line in (Path(__file__).parents[1] / "data" / "truth_messages.jsonl").read_text().splitlines()[1:]]
SMALL = 8192  # scalars: the gradient norm, DDP's broadcast of buffers
# --- PyTorch itself ------------------------------------------------------------------------------------------------------------


def recorded(row: dict[str, Any]) -> dict[tuple[str, ...], list[int]]:
    found: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
    for c in row["communication"]:
        if c["payload_bytes"] > SMALL:
            when = "forward" if c["phase"] == "fwd" else "backward" if c["phase"] == "bwd" else "optimizer"
            entry = found["tp" if c["group"].startswith("tp") else "dp", c["collective"], str(c["group_size"]), when]
            entry[0] += c["count"] or 0
            entry[1] += c["payload_bytes"]
    return dict(found)


def computed(row: dict[str, Any]) -> dict[tuple[str, ...], list[int]]:
    found: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
    when = {
        "forward": "forward",
        "loss": "forward",
        "backward": "backward",
        "recompute": "backward",
        "reduce": "backward",
        "optimizer": "optimizer",
    }
    for m in messages(resolve(validate(row["spec"]))):
        entry = found["tp" if m.axis == "tp" else "dp", m.collective, str(int(m.ranks[0])), when[m.phase]]
        entry[0] += int(m.calls[0])
        entry[1] += int((m.calls * m.bytes_per_call)[0])
    return {key: entry for key, entry in found.items() if entry[1] > SMALL}


@pytest.mark.parametrize("row", ROWS, ids=[r["id"].removeprefix("truth-") for r in ROWS])
def test_pytorch_sends_these_messages(row: dict[str, Any]) -> None:
    want, have = recorded(row), computed(row)
    assert want.keys() == have.keys()
    for key, (calls, size) in want.items():
        assert abs(have[key][1] - size) <= SMALL, key
        assert have[key][0] == calls or not calls, key  # DDP's buckets are its own secret


def test_the_recorded_rows_cover_the_strategies() -> None:
    assert len(ROWS) >= 60
    kinds = {(r["spec"]["strategy"]["framework"], r["spec"]["strategy"]["sharding"]) for r in ROWS}
    assert kinds >= {("ddp", "none"), ("ddp", "zero1"), ("fsdp2", "none"), ("fsdp2", "zero2"), ("fsdp2", "zero3")}


# --- data parallelism ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "units"),
    [
        ({"framework": "ddp", "sharding": "none"}, 2),
        ({"framework": "megatron", "sharding": "none", "gradient_dtype": "bf16"}, 2),
        ({"framework": "megatron", "sharding": "zero1", "gradient_dtype": "bf16"}, 2),
        ({"framework": "fsdp2", "sharding": "zero2", "gradient_dtype": "bf16"}, 2),
        ({"framework": "fsdp2", "sharding": "zero3", "gradient_dtype": "bf16"}, 3),
        ({"framework": "fsdp1", "sharding": "zero2", "gradient_dtype": "bf16"}, 2),
        ({"framework": "deepspeed", "sharding": "none", "gradient_dtype": "bf16"}, 2),
        ({"framework": "deepspeed", "sharding": "zero1", "gradient_dtype": "bf16"}, 3),  # an all-reduce and a gather
    ],
)
def test_units_of_traffic(fields: dict[str, Any], units: int) -> None:
    """Copies of the parameters that a rank sends a step (arXiv:1910.02054, section 7)."""
    of = run(gpus=64, master_weights="none", **fields)
    whole = of.model.parameters * 2
    assert ring_bytes(of) / whole * 64 / 63 == pytest.approx(units, rel=2e-3)


def test_fsdp1_keeps_its_root_after_forward() -> None:
    of = run(gpus=64, framework="fsdp1", sharding="zero3", gradient_dtype="bf16", master_weights="none")
    ends = of.model.embedding.parameters + of.model.head.parameters
    layers = of.model.parameters - ends
    assert ring_bytes(of) * 64 / 63 == pytest.approx(2 * (3 * layers + 2 * ends), rel=1e-3)
    again = run(gpus=8, framework="fsdp1", sharding="zero3", accumulation=4, options={"no_sync": False})
    assert (
        sent(again, "dp_shard", "reduce_scatter")[1]
        == 4 * sent(run(gpus=8, framework="fsdp1", sharding="zero3"), "dp_shard", "reduce_scatter")[1]
    )
    quiet = run(gpus=8, framework="fsdp1", sharding="zero3", accumulation=4, options={"no_sync": True})
    kept = [sent(run(gpus=8, framework="fsdp1", sharding="zero2", accumulation=a, options={"no_sync": True}), "dp_shard") for a in (1, 4)]
    assert kept[0] == kept[1]
    whole = run(gpus=8, framework="fsdp1", sharding="none", accumulation=2, options={"no_sync": False})
    assert sent(whole, "dp", "all_reduce") == (2 * (LAYERS + 1), 2 * 4 * whole.model.parameters)
    assert sent(quiet, "dp_shard", "reduce_scatter")[1] * 4 == sent(again, "dp_shard", "reduce_scatter")[1]


def test_reshard_root_gathers_the_ends_once_less() -> None:
    both, once = (run(reshard_root=r, sharding="zero3") for r in (True, False))
    ends = of_bytes(both, "embedding")
    assert sent(both, "dp_shard", "all_gather")[1] - sent(once, "dp_shard", "all_gather")[1] == ends


def of_bytes(of: Any, words: str) -> int:
    return next(int(m.bytes_per_call[0]) for m in messages(of) if words in m.what and m.collective == "all_gather")


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_ddp_reduces_once_whatever_it_accumulates(sharding: str) -> None:
    one, four = (run(framework="ddp", sharding=sharding, accumulation=a) for a in (1, 4))
    assert sent(one) == sent(four)
    assert sent(one, "dp", "all_reduce")[1] == one.model.parameters * 2
    assert sent(one, "dp", "broadcast") == ((9 * LAYERS + 3, one.model.parameters * 4) if sharding == "zero1" else (0, 0))


@pytest.mark.parametrize(("autocast", "width"), [(False, 2), (True, 4)])
def test_ddp_buckets_in_the_type_of_its_weights(autocast: bool, width: int) -> None:
    """16-bit weights beside fp32 masters have 16-bit gradients; under autocast the weights are fp32. From the head to the embedding, a bucket is closed by
    the tensor that fills it: the first at 1 MiB, the others at 25."""
    of = run(framework="ddp", sharding="none", autocast=autocast)
    layers = [of.model.blocks[name] for name in reversed(of.model.layers)]
    tensors = [w.elements * width for block in (of.model.head, *layers, of.model.embedding) for w in reversed(block.weights)]
    closed, size = 0, 0
    for tensor in tensors:
        size += tensor
        if size >= (25 if closed else 1) * 2**20:
            closed, size = closed + 1, 0
    assert sent(of, "dp", "all_reduce") == (closed + (size > 0), of.model.parameters * width)
    large = run(framework="ddp", sharding="none", autocast=autocast, options={"bucket_cap_mb": 2**20})
    assert sent(large, "dp", "all_reduce") == (1, of.model.parameters * width)


@pytest.mark.parametrize(("schedule", "here"), [("interleaved-1f1b", (1, 3)), ("dualpipe-v", (0, 3))])
def test_ddp_wraps_each_chunk_of_a_pipeline_rank(schedule: str, here: tuple[int, int]) -> None:
    """On the rank with the head each of the two chunks begins with a small bucket of its own. Ten slots over four stages: 3, 3, 2, 2."""
    of = run(gpus=4, framework="ddp", sharding="none", pp=2, schedule=schedule, virtual_stages=2, accumulation=4)
    layer, table, head = (
        [w.elements * 2 for w in reversed(b.weights)] for b in (next(iter(of.model.blocks.values())), of.model.embedding, of.model.head)
    )
    stages = [layer * 2 + table, layer * 3, layer * 2, head + layer]
    buckets = [b for stage in here for b in filled(stages[stage], 2**20, 25 * 2**20)]
    assert sent(of, "dp", "all_reduce") == (len(buckets), sum(buckets))
    assert len(buckets) > len(filled(stages[here[1]] + stages[here[0]], 2**20, 25 * 2**20))


def test_tensors_fill_buckets() -> None:
    assert filled([3, 1, 9, 2, 2, 8], first=1, cap=10) == [3, 10, 12]
    assert filled([3, 4], first=10, cap=10) == [7]
    assert filled([], first=1, cap=10) == []


def test_distributed_optimizer_scatters_in_the_gradients_type_and_gathers_in_the_parameters() -> None:
    of = run(framework="megatron", sharding="zero1", gradient_dtype="fp32")
    assert sent(of, "dp_shard", "reduce_scatter")[1] == 4 * of.model.parameters
    assert sent(of, "dp_shard", "all_gather")[1] == 2 * of.model.parameters
    fp8 = run(framework="megatron", sharding="zero1", precision="fp8", fp8_params=True)
    assert sent(fp8, "dp_shard", "all_gather")[1] == fp8.model.parameters


def test_distributed_optimizer_in_groups() -> None:
    """Sharded inside groups of 8, shards averaged across two of them."""
    of = run(gpus=16, framework="megatron", sharding="zero1", dp_replicate=2, dp_shard=8)
    scatter = sent(of, "dp_shard", "reduce_scatter")[1]
    assert sent(of, "dp_replicate", "all_reduce")[1] == pytest.approx(scatter / 8, rel=1e-6)


def test_megatron_pads_the_vocabulary() -> None:
    """32,000 rows are whole at tp 1 (a multiple of 128), 32,768 at tp 8 (a multiple of 1,024)."""
    model = LLAMA | {"vocab_size": 32000}
    gathered = lambda tp: sent(run(model, gpus=8 * tp, framework="megatron", tp=tp, sequence_parallel=True), "dp_shard", "all_gather")[1]  # noqa: E731
    norms = (2 * LAYERS + 1) * HIDDEN
    products = run(model).model.parameters - norms - 2 * 32000 * HIDDEN
    assert gathered(1) == 2 * (products + norms + 2 * 32000 * HIDDEN)
    assert gathered(8) == 2 * (products // 8 + norms + 2 * 32768 // 8 * HIDDEN)


def test_deepspeed_reduces_every_micro_batch_from_stage_two_on() -> None:
    def reduced(sharding: str, accumulation: int) -> int:
        of = run(framework="deepspeed", sharding=sharding, accumulation=accumulation)
        return sum(sent(of, ("dp", "dp_shard"), c, "reduce")[1] for c in ("all_reduce", "reduce_scatter"))

    assert reduced("zero1", 4) == reduced("zero1", 1) == reduced("zero2", 1)
    assert reduced("zero2", 4) == 4 * reduced("zero2", 1)
    assert reduced("zero3", 4) == 4 * reduced("zero3", 1)


def test_zero1_broadcasts_what_it_trains() -> None:
    of = run(framework="ddp", sharding="zero1", method="lora", lora_rank=8, lora_targets=["q_proj"], master_weights="fp32")
    assert sent(of, "dp", "broadcast") == (2 * LAYERS, 4 * LAYERS * 8 * (1024 + 1024))


def test_deepspeed_scatters_when_it_is_told_to() -> None:
    """reduce_scatter: true is an all-reduce of whole buckets unless use_multi_rank_bucket_allreduce is switched off."""
    of = run(framework="deepspeed", sharding="zero2", options={"use_multi_rank_bucket_allreduce": False})
    assert sent(of, "dp", "reduce_scatter")[1] == sent(run(framework="deepspeed", sharding="zero2"), "dp", "all_reduce")[1]


@pytest.mark.parametrize(
    ("framework", "options", "words"),
    [
        ("deepspeed", {"overlap_comm": "yes"}, "strategy.options.overlap_comm: 'yes' is not true or false"),
        ("deepspeed", {"reduce_bucket_size": 0}, "strategy.options.reduce_bucket_size: '0' is not a number of 1 or more"),
        ("ddp", {"bucket_cap_mb": "big"}, "strategy.options.bucket_cap_mb: 'big' is not a number"),
    ],
)
def test_options_of_the_wrong_kind(framework: str, options: dict[str, Any], words: str) -> None:
    of = run(framework=framework, sharding="zero1", options=options)
    with pytest.raises(SpecError) as caught:
        messages(of)
    assert words in str(caught.value)


def test_auto_is_the_frameworks_default() -> None:
    auto = run(framework="deepspeed", sharding="zero2", options={"reduce_bucket_size": "auto", "allgather_bucket_size": 5e8})
    assert sent(auto) == sent(run(framework="deepspeed", sharding="zero2"))


def test_zero3_of_deepspeed_keeps_what_it_needs_again_soon() -> None:
    """All layers of a small model fit inside stage3_max_reuse_distance; with 0 every layer is gathered twice."""
    near, far = (run(framework="deepspeed", sharding="zero3", options=o) for o in ({}, {"stage3_max_reuse_distance": 0}))
    assert sent(near, "dp_shard", "all_gather", "backward", "a layer") == (0, 0)
    assert sent(far, "dp_shard", "all_gather", "backward") == sent(far, "dp_shard", "all_gather", "forward")
    small = (2 * LAYERS + 1) * HIDDEN
    assert sent(far, "dp_shard", "all_gather", "optimizer")[1] == 2 * small


def test_hybrid_sharding_scatters_near_and_reduces_far() -> None:
    of = run(gpus=32, dp_replicate=4, dp_shard=8, sharding="zero3")
    across = [m for m in messages(of) if m.axis == "dp_replicate"]
    assert {(int(m.ranks[0]), int(m.stride[0])) for m in across} == {(4, 8)}
    assert sent(of, "dp_replicate", "all_reduce")[1] * 8 == sent(of, "dp_shard", "reduce_scatter")[1]


@pytest.mark.parametrize("framework", ["fsdp2", "ddp", "deepspeed", "megatron"])
def test_lora_reduces_its_adapters_only(framework: str) -> None:
    """Rank 8 on q and v: A (8 x 1024) and B (1024 or 512 x 8) in each of 8 layers."""
    of = run(
        framework=framework, method="lora", lora_rank=8, lora_targets=["q_proj", "v_proj"], gradient_dtype="fp32", master_weights="fp32"
    )
    reduced = sum(sent(of, ("dp", "dp_shard"), c, "reduce")[1] for c in ("all_reduce", "reduce_scatter"))
    assert reduced == 4 * LAYERS * 8 * (2 * 1024 + 1024 + 512)


# --- columns -------------------------------------------------------------------------------------------------------------------

STRUCTURES = [
    Structure("megatron", sharding="zero1", sequence_parallel=True),
    Structure("megatron", sharding="none", recompute="full"),
    Structure("fsdp2", sharding="zero3", sequence_parallel=True, recompute="selective"),
    Structure("fsdp2", sharding="zero2"),
    Structure("fsdp2", sharding="none"),
    Structure("fsdp1", sharding="zero3"),
    Structure("ddp", sharding="zero1"),
    Structure("deepspeed", sharding="zero2"),
    Structure("deepspeed", sharding="zero3"),
]
power = st.sampled_from([1, 2, 4])
plans = st.builds(
    ParallelPlan,
    st.sampled_from(STRUCTURES),
    dp_replicate=power,
    dp_shard=power,
    tp=power,
    pp=power,
    cp=power,
    ep=power,
    virtual_stages=st.sampled_from([1, 2]),
    micro_batch_size=power,
    accumulation=st.integers(1, 5),
)


def totals(found: list[Any], i: int) -> dict[tuple[str, ...], int]:
    out: dict[tuple[str, ...], int] = defaultdict(int)
    for m in found:
        if m.calls[i]:
            out[m.axis, m.collective, m.phase, m.overlaps, m.what, str(m.ranks[i]), str(m.stride[i]), str(m.bytes_per_call[i])] += int(
                m.calls[i]
            )
    return dict(out)


@settings(max_examples=25, deadline=None)
@given(st.lists(plans, min_size=1, max_size=6))
def test_a_table_of_plans_is_each_plan_alone(many: list[ParallelPlan]) -> None:
    of = run(TINY_MOE)
    together = traffic(of.model, of.cluster, of.job, PlanTable.from_plans(many))
    for i, plan in enumerate(many):
        assert totals(together, i) == totals(traffic(of.model, of.cluster, of.job, PlanTable.from_plans([plan])), 0)


@settings(max_examples=50, deadline=None)
@given(plans)
def test_groups_lie_inside_the_world(plan: ParallelPlan) -> None:
    """Whole positive columns; a group of one sends nothing; members reach no further than the GPUs of the plan."""
    of = run(LLAMA)
    for m in traffic(of.model, of.cluster, of.job, PlanTable.from_plans([plan])):
        assert m.bytes_per_call.dtype == m.calls.dtype == np.int64
        assert int(m.bytes_per_call[0]) > 0
        assert int(m.calls[0]) > 0
        assert int(m.ranks[0]) > 1
        assert (int(m.ranks[0]) - 1) * int(m.stride[0]) < plan.gpus


def test_one_gpu_sends_nothing() -> None:
    for structure in STRUCTURES:
        of = run(gpus=1, framework=structure.framework, sharding=structure.sharding)
        assert messages(of) == []
