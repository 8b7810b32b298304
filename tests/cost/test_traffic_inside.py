"""What tensor, pipeline, context and expert parallelism send, held to what is published of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainwright.cost.table import PlanTable
from trainwright.cost.traffic import Case, pipeline_stage, traffic, worst_rank

from .traffic_runs import HIDDEN, LAYERS, LLAMA, SEQ, TINY_MOE, messages, run, sent

N = SEQ * HIDDEN * 2  # one activation of a micro-batch, 16 bit


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
