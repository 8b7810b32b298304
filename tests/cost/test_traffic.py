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
from trainwright.cost.traffic import Case, pipeline_stage, traffic, worst_rank
from trainwright.resolve import resolve
from trainwright.spec.plan import ParallelPlan, Structure
from trainwright.spec.run import validate

from .traffic_runs import HIDDEN, LAYERS, LLAMA, SEQ, messages, ring_bytes, run, sent

ROWS = [json.loads(line) for line in (Path(__file__).parents[1] / "data" / "truth_messages.jsonl").read_text().splitlines()[1:]]
SMALL = 8192  # scalars: the gradient norm, DDP's broadcast of buffers
N = SEQ * HIDDEN * 2  # one activation of a micro-batch, 16 bit
TINY_MOE = {
    "model_type": "mixtral",
    "hidden_size": 1024,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


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
    again = run(gpus=8, framework="fsdp1", sharding="zero3", accumulation=4)
    assert (
        sent(again, "dp_shard", "reduce_scatter")[1]
        == 4 * sent(run(gpus=8, framework="fsdp1", sharding="zero3"), "dp_shard", "reduce_scatter")[1]
    )
    quiet = run(gpus=8, framework="fsdp1", sharding="zero3", accumulation=4, options={"no_sync": True})
    kept = [sent(run(gpus=8, framework="fsdp1", sharding="zero2", accumulation=a, options={"no_sync": True}), "dp_shard") for a in (1, 4)]
    assert kept[0] == kept[1]
    whole = run(gpus=8, framework="fsdp1", sharding="none", accumulation=2)
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
def test_ddp_buckets_of_25_mib_in_the_type_of_its_weights(autocast: bool, width: int) -> None:
    """16-bit weights beside fp32 masters have 16-bit gradients; under autocast the weights are fp32."""
    of = run(framework="ddp", sharding="none", autocast=autocast)
    whole = of.model.parameters * width
    calls, size = sent(of, "dp", "all_reduce")
    assert (calls, size) == (-(-whole // (25 * 2**20)), whole)


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


# --- tensor parallelism --------------------------------------------------------------------------------------------------------


def test_dtensor_reduces_each_product_and_megatron_each_input() -> None:
    dtensor = run(framework="fsdp2", tp=8, sharding="none")
    assert sent(dtensor, "tp", "all_reduce", "forward") == (2 * LAYERS + 1, (2 * LAYERS + 1) * N)
    assert sent(dtensor, "tp", "all_reduce", "backward") == (5 * LAYERS + 1, (5 * LAYERS + 1) * N)
    megatron = run(framework="megatron", tp=8, sequence_parallel=False)
    assert sent(megatron, "tp", "all_reduce", "forward") == (2 * LAYERS + 1, (2 * LAYERS + 1) * N)
    assert sent(megatron, "tp", "all_reduce", "backward") == (2 * LAYERS + 1, (2 * LAYERS + 1) * N)


def test_sequence_parallelism_sends_what_all_reduce_does_forward() -> None:
    """A gather and a scatter of a ring are an all-reduce; Megatron gathers the inputs once more backward (arXiv:2205.05198, section 4.2.2)."""
    of = run(framework="megatron", tp=8, sequence_parallel=True)
    calls = 2 * LAYERS + 1
    assert sent(of, "tp", "all_gather", "forward") == sent(of, "tp", "reduce_scatter", "forward") == (calls, calls * N)
    assert sent(of, "tp", "reduce_scatter", "backward") == (calls, calls * N)
    assert sent(of, "tp", "all_gather", "backward") == (2 * calls, 2 * calls * N)
    dtensor = run(framework="fsdp2", tp=8, sharding="none", sequence_parallel=True)
    assert sent(dtensor, "tp", "all_gather", "backward") == (calls, calls * N)


def test_vocabulary_parallel_loss_sends_three_numbers_a_token() -> None:
    plain, parallel = (run(framework="fsdp2", tp=8, sharding="none", loss=loss) for loss in ("plain", "vocab-parallel"))
    assert sent(plain, "tp", phase="loss") == (1, SEQ * 32768 * 2)
    assert sent(parallel, "tp", phase="loss") == (3, 3 * 4 * SEQ)


def test_logits_of_a_vocabulary_that_does_not_divide_are_padded() -> None:
    of = run(LLAMA | {"vocab_size": 32001}, tp=8, sharding="none", loss="plain")
    assert sent(of, "tp", phase="loss") == (1, SEQ * 32008 * 2)


@pytest.mark.parametrize(
    ("fields", "gathers", "others"),
    [
        ({"framework": "fsdp2", "sharding": "none", "sequence_parallel": True}, 2, 1),
        ({"framework": "fsdp2", "sharding": "none"}, 0, 1),
        ({"framework": "megatron", "sequence_parallel": True}, 2, 2),
        ({"framework": "megatron", "sequence_parallel": False}, 0, 2),
    ],
)
def test_full_recomputation_repeats_forward(fields: dict[str, Any], gathers: int, others: int) -> None:
    """PyTorch stops at the last tensor that backward wants, before the last product's reduction; Megatron runs the whole block."""
    of = run(tp=8, recompute="full", **fields)
    assert sent(of, "tp", "all_gather", "recompute")[0] == gathers * LAYERS
    assert sent(of, "tp", "reduce_scatter", "recompute")[0] + sent(of, "tp", "all_reduce", "recompute")[0] == others * LAYERS
    assert sent(run(tp=8, recompute="none", **fields), phase="recompute") == (0, 0)


def test_recomputing_several_layers_in_one_piece_repeats_all_but_one_reduction() -> None:
    of = run(tp=8, framework="fsdp2", sharding="none", recompute="full", recompute_every=4)
    assert sent(of, "tp", "all_reduce", "recompute")[0] == 2 * LAYERS - LAYERS // 4


@pytest.mark.parametrize(("modules", "expected"), [(["core_attn"], 0), (["mlp"], 2)])
def test_selective_recomputation_of_megatron(modules: list[str], expected: int) -> None:
    of = run(tp=8, framework="megatron", sequence_parallel=True, recompute="selective", recompute_modules=modules)
    assert sent(of, "tp", phase="recompute")[0] == expected * LAYERS


# --- pipeline, context, experts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2)])
@pytest.mark.parametrize("tp", [1, 2])
def test_stages_send_one_activation_on_and_one_gradient_back(schedule: str, virtual: int, tp: int) -> None:
    of = run(
        gpus=4 * tp, pp=4, tp=tp, framework="megatron", schedule=schedule, virtual_stages=virtual, accumulation=8, sequence_parallel=tp > 1
    )
    for phase in ("forward", "backward"):
        assert sent(of, "pp", "send_recv", phase) == (8 * virtual, 8 * virtual * N // tp)
    assert {int(m.stride[0]) for m in messages(of) if m.axis == "pp"} == {tp}


def test_the_rank_with_the_most_parameters_speaks_for_the_pipeline() -> None:
    of = run(gpus=4, pp=4, framework="megatron", accumulation=8)
    table = PlanTable.from_plans([of.plan])
    assert worst_rank(of.model, of.cluster, of.job, table).tolist() == [3]  # even stages, and the final norm beside the head
    ranks = [traffic(of.model, of.cluster, of.job, table, np.array([r])) for r in range(4)]
    forward = [sum(int(m.calls[0]) for m in sent if m.axis == "pp" and m.phase == "forward") for sent in ranks]
    backward = [sum(int(m.calls[0]) for m in sent if m.axis == "pp" and m.phase == "backward") for sent in ranks]
    assert (forward, backward) == ([8, 8, 8, 0], [0, 8, 8, 8])


def test_ranks_of_a_pipeline_share_the_model() -> None:
    """What the four ranks gather adds up to what one rank without a pipeline gathers."""
    alone = run(gpus=8, framework="megatron", accumulation=8)
    of = run(gpus=32, pp=4, framework="megatron", accumulation=8)
    table = PlanTable.from_plans([of.plan])
    each = [traffic(of.model, of.cluster, of.job, table, np.array([r])) for r in range(4)]
    gathered = sum(
        int((m.calls * m.bytes_per_call)[0]) for sent in each for m in sent if m.axis == "dp_shard" and m.collective == "all_gather"
    )
    assert gathered == sent(alone, "dp_shard", "all_gather")[1]


def test_tied_ends_of_a_pipeline_sum_their_gradients() -> None:
    tied, untied = (
        run(LLAMA | {"tie_word_embeddings": t}, gpus=8, pp=4, tp=2, framework="megatron", accumulation=8) for t in (True, False)
    )
    found = [m for m in messages(tied) if m.axis == "pp" and m.collective == "all_reduce"]
    assert [(int(m.ranks[0]), int(m.stride[0]), int(m.bytes_per_call[0])) for m in found] == [(2, 6, 32768 // 2 * HIDDEN * 4)]
    assert sent(untied, "pp", "all_reduce") == (0, 0)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("sharding", "gathers"), [("zero2", 1), ("zero3", 7)])
def test_pipeline_stages_of_fsdp2_gather_less_than_every_time(rank: int, schedule: str, sharding: str, gathers: int) -> None:
    """Counted with torch 2.13 under a fake process group: 4 stages, 6 micro-batches; resharding is off between backwards, so m + 1."""
    of = run(gpus=8, pp=4, framework="fsdp2", sharding=sharding, schedule=schedule, accumulation=6)
    found = traffic(of.model, of.cluster, of.job, PlanTable.from_plans([of.plan]), np.array([rank]))
    layers = [m for m in found if m.collective == "all_gather" and "a layer" in m.what]
    stage = pipeline_stage(Case(of.model, of.cluster, of.job, of.plan.structure, PlanTable.from_plans([of.plan]), np.array([rank])))
    assert sum(int(m.calls[0]) for m in layers) == gathers * sum(int(n[0]) for n in stage.layers.values())


def test_norm_gradients_are_summed_once_under_fsdp() -> None:
    """Counted with torch 2.13 under a fake process group: in the micro-batch that is reduced, not in those before."""
    of = run(gpus=8, tp=2, sharding="zero3", sequence_parallel=True, accumulation=4)
    assert sent(of, "tp", "all_reduce", "backward") == (2 * LAYERS + 1, (2 * LAYERS + 1) * 2 * HIDDEN)


@pytest.mark.parametrize("bias", [False, True])
def test_selective_recomputation_of_torchtitan(bias: bool) -> None:
    """Counted with torch 2.13 under a fake process group: one all-reduce a layer; with sequence parallelism two gathers."""
    model = LLAMA | {"attention_bias": bias}
    assert sent(run(model, tp=8, sharding="none", recompute="selective"), "tp", phase="recompute") == (LAYERS, LAYERS * N)
    parallel = run(model, tp=8, sharding="none", recompute="selective", sequence_parallel=True)
    assert sent(parallel, "tp", "all_gather", "recompute") == sent(parallel, "tp", phase="recompute") == (2 * LAYERS, 2 * LAYERS * N)


KV = SEQ // 4 * 2 * 8 * 64 * 2  # keys and values of 8 heads of 64, for a quarter of the tokens


@pytest.mark.parametrize(
    ("kind", "collective", "forward"),
    [
        ("ring", "send_recv", (3 * LAYERS, 3 * LAYERS * KV)),
        ("allgather", "all_gather", (LAYERS, LAYERS * 4 * KV)),
        ("ulysses", "all_to_all", (4 * LAYERS, LAYERS * (2 * SEQ // 4 * 16 * 64 * 2 + KV))),
    ],
)
def test_context_parallelism(kind: str, collective: str, forward: tuple[int, int]) -> None:
    of = run(gpus=8, cp=4, cp_kind=kind, framework="megatron")
    assert sent(of, "cp", collective, "forward") == forward
    assert sent(of, "cp", phase="backward")[1] >= forward[1]
    assert {int(m.stride[0]) for m in messages(of) if m.axis == "cp"} == {1}


def test_gradients_are_averaged_over_data_and_context() -> None:
    of = run(gpus=16, cp=2, tp=2, framework="megatron", sharding="zero1", sequence_parallel=True)
    assert {(int(m.ranks[0]), int(m.stride[0])) for m in messages(of) if m.axis == "dp_shard"} == {(8, 2)}


def test_experts_exchange_their_tokens_four_times_a_layer() -> None:
    of = run(TINY_MOE, gpus=8, ep=8, framework="megatron", accumulation=2)
    assert sent(of, "ep", "all_to_all") == (4 * LAYERS * 2, 4 * LAYERS * 2 * 2 * N)  # top 2, two micro-batches
    half = run(TINY_MOE, gpus=8, ep=8, framework="megatron", accumulation=2, moe_capacity_factor=0.5)
    assert 2 * sent(half, "ep")[1] == sent(of, "ep")[1]
    assert sent(run(TINY_MOE, gpus=8, ep=8, framework="megatron", recompute="full"), "ep", phase="recompute")[0] == 2 * LAYERS


def test_experts_are_reduced_in_a_group_of_their_own() -> None:
    """16 GPUs, 8 experts on 8 ranks: two ranks hold the same expert, 16 the same attention."""
    of = run(TINY_MOE, gpus=16, ep=8, framework="megatron", sharding="zero1")
    groups = {(int(m.ranks[0]), int(m.stride[0])): "expert" in m.what for m in messages(of) if m.axis == "dp_shard"}
    assert groups == {(16, 1): False, (2, 8): True}
    expert = sum(w.elements for w in of.model.blocks[of.model.layers[0]].weights if w.ep_dim is not None)
    assert sent(of, "dp_shard", "all_gather", what="expert")[1] == 2 * LAYERS * expert // 8


def test_tensor_parallel_experts_gather_their_tokens() -> None:
    of = run(TINY_MOE, gpus=8, tp=2, ep=2, etp=2, framework="megatron", sequence_parallel=True)
    assert sent(of, "ep", "all_to_all", "forward") == (2 * LAYERS, 2 * LAYERS * 2 * N // 2)
    assert sent(of, "tp", "all_gather", "forward", "expert") == (LAYERS, LAYERS * 2 * N)


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
