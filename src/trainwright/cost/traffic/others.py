"""Pipeline, context and expert parallelism: activations that move between ranks."""

from __future__ import annotations

import numpy as np

from ...schedules import SCHEDULES
from ...spec.blocks import Op
from ..message import Phase
from ..table import IntColumn
from .columns import Case


def _phases(recomputed: bool) -> tuple[Phase, ...]:
    return ("forward", "backward", "recompute") if recomputed else ("forward", "backward")


def pipeline_parallel(case: Case) -> None:
    """One activation forward and one gradient back over every boundary of a chunk and micro-batch: N h elements, / tp with sequence
    parallelism.

    An inner rank of the pipeline sends both; where the rank of the other messages stands at an end, these are still an inner rank's.
    """
    if not (case.table.pp > 1).any():
        return
    tokens = case.tokens
    if case.sequence_parallel:
        tokens = -(-tokens // case.tp)
    size = tokens * case.model.hidden * case.activation_bytes
    most = case.stage.chunks * case.micro_batches
    # with several chunks a rank computes another one while one travels (Megatron's overlap_p2p_comm, torch's asynchronous p2p)
    schedule = SCHEDULES[case.structure.schedule]
    overlaps = "pipeline" if schedule.chunks != "one" or schedule.placement == "bidirectional" else ""
    interior = case.rank is None
    ways: tuple[tuple[Phase, IntColumn, str], ...] = (
        ("forward", case.stage.sends_forward, "activations to the next stage"),
        ("backward", case.stage.sends_backward, "gradients to the stage before"),
    )
    for phase, sends, what in ways:
        one = np.where(case.table.pp > 1, most, 0) if interior else sends * case.micro_batches
        case.add("pp", "send_recv", phase, size, one, case.table.pp, case.pipeline_stride, overlaps=overlaps, what=what)


def context_parallel(case: Case) -> None:
    """Attention over a sequence that is cut: keys and values travel around a ring, are gathered, or heads are exchanged for tokens
    (Ulysses).

    Sources: arXiv:2310.01889 (ring), arXiv:2407.21783 section 3.3.2 (all-gather), arXiv:2309.14509 (Ulysses).
    """
    if not (case.table.cp > 1).any():
        return
    if case.job.packing and _pytorch(case):
        size = 8 * case.tokens * case.table.cp
        calls = case.stage.chunks * case.micro_batches
        case.add("cp", "all_gather", "forward", size, calls, case.table.cp, case.tp, what="numbers of every token's document")
    for name, count in case.stage.layers.items():
        for op in case.model.blocks[name].rows("attention"):
            {"ring": _ring, "allgather": _all_gather, "ulysses": _ulysses}[case.structure.cp_kind](case, op, count)


def _pytorch(case: Case) -> bool:
    return case.structure.framework in ("fsdp2", "fsdp1", "ddp")


def _again(case: Case) -> bool:
    """Whether attention runs a second time in backward, and sends again."""
    return case.structure.recompute == "full" or "core_attn" in case.structure.recompute_modules


def _heads(case: Case, heads: int) -> IntColumn:
    """Heads of a rank; never less than one."""
    return np.maximum(1, -(-heads // case.tp))


def _key_value_bytes(case: Case, op: Op) -> IntColumn:
    return case.tokens * _heads(case, op.kv_heads) * (op.head_dim + (op.v_head_dim or op.head_dim)) * case.activation_bytes


def _ring(case: Case, op: Op, count: IntColumn) -> None:
    """cp - 1 steps each way; backward sends the gradients of keys and values along with them, and once more to their owner: PyTorch in fp32
    (torch.distributed.tensor.experimental, `convert_to_f32`)."""
    size, cp, calls = _key_value_bytes(case, op), case.table.cp, count * case.micro_batches
    for phase in _phases(_again(case)):
        case.add("cp", "send_recv", phase, size, calls * (cp - 1), cp, case.tp, overlaps="product", what="keys and values around the ring")
    if _pytorch(case):
        size = size // case.activation_bytes * 4
    case.add("cp", "send_recv", "backward", size, calls * cp, cp, case.tp, overlaps="product", what="gradients of keys and values")


def _all_gather(case: Case, op: Op, count: IntColumn) -> None:
    size, cp, calls = _key_value_bytes(case, op) * case.table.cp, case.table.cp, count * case.micro_batches
    for phase in _phases(_again(case)):
        case.add("cp", "all_gather", phase, size, calls, cp, case.tp, what="keys and values")
    case.add("cp", "reduce_scatter", "backward", size, calls, cp, case.tp, what="gradients of keys and values")


def _ulysses(case: Case, op: Op, count: IntColumn) -> None:
    """Queries and outputs, keys and values: tokens / cp of all heads <-> all tokens of heads / cp. Fewer key-value heads than ranks are
    repeated."""
    cp, calls, c = case.table.cp, count * case.micro_batches, case.activation_bytes
    wide = case.tokens * _heads(case, op.heads) * op.head_dim * c
    narrow = case.tokens * np.maximum(_heads(case, op.kv_heads), cp) * op.head_dim * c
    for phase in _phases(_again(case)):
        # where attention alone runs again, nobody reads its outputs
        sides = 1 if phase == "recompute" and case.structure.recompute != "full" else 2
        case.add("cp", "all_to_all", phase, wide, sides * calls, cp, case.tp, what="queries, outputs")
        case.add("cp", "all_to_all", phase, narrow, 2 * calls, cp, case.tp, what="keys, values")


def expert_parallel(case: Case) -> None:
    """Tokens to their experts and back, top_k copies of each, forward and backward (arXiv:2006.16668); with expert tensor parallelism the
    ranks of an expert then gather their tokens and scatter the partial sums."""
    ep, etp = case.table.ep, case.table.etp
    if not ((ep > 1) | (etp > 1)).any():
        return
    factor = min(1.0, case.job.moe_capacity_factor or 1.0)
    tokens = -(-case.tokens // case.tp) if case.sequence_parallel else case.tokens
    overlaps = "layer" if case.switch("overlap_moe_expert_parallel_comm", False) else ""
    again = case.structure.recompute == "full" or "moe" in case.structure.recompute_modules
    for block, count in case.stage.blocks(case.model):
        for op in block.rows("dispatch"):
            size = (tokens * op.top_k * factor).astype(np.int64) * op.width * case.activation_bytes
            calls = count * case.micro_batches
            if _pytorch(case) and case.job.moe_capacity_factor is None:
                for when in (p for p in _phases(again) if p != "backward"):
                    case.add("ep", "all_to_all", when, 8 * case.model.experts, calls, ep, etp, what="numbers of tokens for every expert")
            for phase in _phases(again):
                case.add("ep", "all_to_all", phase, size, calls, ep, etp, overlaps=overlaps, what="tokens to their experts")
                case.add("ep", "all_to_all", phase, size, calls, ep, etp, overlaps=overlaps, what="tokens back from their experts")
                if case.sequence_parallel:
                    case.add("tp", "all_gather", phase, size * etp, calls, etp, 1, what="tokens of an expert's ranks")
                    case.add("tp", "reduce_scatter", phase, size * etp, calls, etp, 1, what="partial sums of an expert's ranks")
                else:
                    case.add("tp", "all_reduce", phase, size, calls, etp, 1, what="partial sums of an expert's ranks")
