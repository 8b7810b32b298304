"""What the tape promises for any plan: closed forms of saved bytes, sums, monotone shards, rows that do not depend on their table."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.cost.memory_table import PARTS, STATES, MemoryTable, concatenate
from trainwright.cost.parameters import greedy_partition, optimizer_state
from trainwright.cost.table import PlanTable
from trainwright.cost.tape import memory_rows
from trainwright.cost.tape.program import pattern
from trainwright.models import build_model
from trainwright.spec.job import TrainingJob
from trainwright.spec.model import ModelSpec
from trainwright.spec.optimizer import OPTIMIZERS
from trainwright.spec.plan import ParallelPlan, Structure

LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 11, "num_attention_heads": 16, "num_key_value_heads": 4,
    "intermediate_size": 2816, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
GPT = {"model_type": "gpt2", "n_embd": 512, "n_head": 8, "n_layer": 9, "n_positions": 2048, "vocab_size": 50304}
GEMMA = {
    "model_type": "gemma2", "hidden_size": 512, "num_hidden_layers": 14, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 2048, "vocab_size": 32000, "sliding_window": 512,
}  # fmt: skip
JOB = TrainingJob(seq_len=1024, global_batch_size=8, master_weights="none", gradient_dtype="bf16")


@cache
def model(family: str) -> ModelSpec:
    return build_model({"llama": LLAMA, "gpt2": GPT, "gemma2": GEMMA}[family], family)


def rows(family: str, plans: list[ParallelPlan], job: TrainingJob = JOB) -> MemoryTable:
    assert len({p.structure for p in plans}) == 1
    return memory_rows(model(family), None, job, plans[0].structure, PlanTable.from_plans(plans))  # type: ignore[arg-type]


def plan(structure: Structure, **numbers: int) -> ParallelPlan:
    return ParallelPlan(structure, **numbers)


# ---- closed forms


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_llama_saves_what_the_formula_says(batch: int) -> None:
    """Norms 2(8Nh + 4N), q, out, k, v 2N(2nd + 2kd), log-sum-exp 4Nn, random state 24, MLP 8Nf; final norm, cos and sin, log-softmax."""
    n, h, f, heads, kv, d, layers, vocab, seq = batch * 1024, 1024, 2816, 16, 4, 64, 11, 32000, 1024
    layer = 2 * (8 * n * h + 4 * n) + 2 * n * (2 * heads * d + 2 * kv * d) + 4 * n * heads + 24 + 8 * n * f
    ends = 8 * n * h + 4 * n + 2 * seq * d * 2 + 4 * n * vocab + 8
    found = rows("llama", [plan(Structure(sharding="none"), micro_batch_size=batch)])
    assert int(found.saved_bytes[0]) == layers * layer + ends


@pytest.mark.parametrize("batch", [1, 3])
def test_a_gpt_saves_what_the_formula_says(batch: int) -> None:
    """A layer 32Nh + 8N (statistics) + 4Nn + 24; ends: final norm's input and output 4Nh + 4N, log-softmax 4NV + 8."""
    n, h, heads, layers, vocab = batch * 1024, 512, 8, 9, 50304
    found = rows("gpt2", [plan(Structure(sharding="none"), micro_batch_size=batch)])
    assert int(found.saved_bytes[0]) == layers * (32 * n * h + 8 * n + 4 * n * heads + 24) + 4 * n * h + 4 * n + 4 * n * vocab + 8


def test_full_recomputation_keeps_one_input_a_region() -> None:
    n, h = 1024, 1024
    every = [rows("llama", [plan(Structure(sharding="none", recompute="full", recompute_every=k))]).saved_bytes[0] for k in (1, 2, 3)]
    regions = [11, 6, 4]
    assert every[0] - every[1] == (regions[0] - regions[1]) * 2 * n * h
    assert every[1] - every[2] == (regions[1] - regions[2]) * 2 * n * h


def test_a_pipeline_rank_holds_activations_by_its_schedule() -> None:
    """1F1B: min(p - r, m) micro-batches; GPipe: all of them."""
    peaks = {}
    for schedule in ("1f1b", "gpipe"):
        structure = Structure(sharding="none", schedule=schedule, layers_per_stage=(3, 3, 3, 2))
        peaks[schedule] = rows("llama", [plan(structure, pp=4, accumulation=m) for m in (8, 12, 16)])
    hidden = 2 * 1024 * 1024
    grow = np.diff(peaks["1f1b"].peak_bytes)
    per_microbatch = hidden + 16 * 1024 if peaks["1f1b"].pipeline_rank[0] in (0, 3) else 2 * hidden + 16 * 1024
    assert set(grow) == {4 * per_microbatch}
    assert (peaks["gpipe"].peak_bytes >= peaks["1f1b"].peak_bytes).all()
    assert peaks["gpipe"].peak_bytes[2] > peaks["1f1b"].peak_bytes[2]


# ---- states


def test_zero_redundancy_optimizer_deals_whole_tensors() -> None:
    assert greedy_partition([5, 9, 5, 1, 1], 2) == [[1, 3, 4], [0, 2]]  # of equals the first
    sizes = [300, 200, 200, 100, 50, 50]
    parts = greedy_partition(sizes, 3)
    assert sorted(i for p in parts for i in p) == list(range(6))
    assert parts[0][0] == 0


@pytest.mark.parametrize(
    ("name", "rows_", "columns", "bytes_"),
    [
        ("adamw", 100, 10, 2 * 4 * 1000 + 4),
        ("sgd", 100, 10, 0),
        ("sgd_momentum", 100, 10, 4000),
        ("adam8bit", 100, 100, 2 * 10000 + 2 * 4 * 40),
        ("adam8bit", 10, 10, 2 * 4 * 100),
        ("adafactor", 100, 10, 4 * 110 + 4),
        ("muon", 100, 10, 4000),
    ],
)
def test_states_of_one_matrix(name: str, rows_: int, columns: int, bytes_: int) -> None:
    assert int(optimizer_state(OPTIMIZERS[name], [np.array([rows_]), np.array([columns])], 4)[0]) == bytes_


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["llama", "gpt2", "gemma2"]), st.sampled_from(["zero2", "zero3"]), st.integers(1, 9), st.sampled_from([1, 2, 4]))
def test_more_shards_never_mean_more_states(family: str, sharding: str, shards: int, tp: int) -> None:
    found = rows(family, [plan(Structure(sharding=sharding), dp_shard=k, tp=tp) for k in (shards, 2 * shards, 8 * shards)])
    for name in STATES:
        assert (np.diff(found.states[name]) <= 0).all()


# ---- tables


@st.composite
def structures(draw: Any) -> Structure:
    framework = draw(st.sampled_from(["fsdp2", "fsdp2", "ddp"]))
    recompute = draw(st.sampled_from(["none", "full", "selective"]))
    return Structure(
        framework=framework,
        sharding=draw(st.sampled_from(["none", "zero2", "zero3"] if framework == "fsdp2" else ["none", "zero1"])),
        sequence_parallel=draw(st.booleans()),
        recompute=recompute,
        recompute_every=draw(st.sampled_from([1, 2, 3])) if recompute == "full" else 1,
        recompute_modules=("core_attn",) if recompute == "selective" and draw(st.booleans()) else (),
        attention=draw(st.sampled_from(["flash", "efficient", "eager"])),
        reshard_root=draw(st.booleans()),
    )


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["llama", "gpt2", "gemma2"]),
    structures(),
    st.sampled_from(["bf16", "fp32"]),
    st.booleans(),
    st.sampled_from(["adamw", "sgd_momentum", "adam8bit"]),
    st.sampled_from(["fused", "foreach", "for-loop"]),
)
def test_any_table(family: str, structure: Structure, precision: str, autocast: bool, optimizer: str, kernel: str) -> None:
    """Parts sum to the peak, a row is what it would be alone, and a few layers with slopes are all of them."""
    job = TrainingJob(
        seq_len=256, global_batch_size=8, precision=precision, autocast=autocast, optimizer=optimizer, optimizer_kernel=kernel
    )
    torchs = structure.framework == "fsdp2"
    shapes = [(1, 1, 1, 1, 1), (4, 1, 1, 2, 4), (4, 2, 1, 2, 1), (2, 2, 2, 1, 4)] if torchs else [(1, 1, 1, 1, 1), (4, 1, 1, 2, 3)]
    plans = [plan(structure, dp_shard=d, tp=t, pp=p, micro_batch_size=b, accumulation=a) for d, t, p, b, a in shapes]
    found = rows(family, plans, job)
    assert np.array_equal(sum(found.breakdown[part] for part in PARTS), found.peak_bytes)
    assert all((found.phases[p] <= found.peak_bytes).all() for p in found.phases)
    for i, one in enumerate(plans):
        alone = rows(family, [one], job)
        assert alone.peak_bytes[0] == found.peak_bytes[i]
        assert all(alone.states[k][0] == found.states[k][i] for k in STATES)
    moments = found.timeline(len(plans) - 1)
    for phase in ("forward", "backward", "optimizer"):
        assert max((m.bytes for m in moments if m.phase == phase), default=0) == int(found.phases[phase][-1])


def test_tables_join() -> None:
    a, b = (rows("llama", [plan(Structure(sharding="zero3"), dp_shard=d)]) for d in (2, 4))
    both = concatenate([a, b])
    assert list(both.peak_bytes) == [a.peak_bytes[0], b.peak_bytes[0]]
    assert both.terms(1)[0] == b.terms(0)[0]
    assert both.moment(1) == b.moment(0)


@pytest.mark.parametrize(
    ("names", "head", "unit", "repeats", "tail"),
    [
        ("aaaaaa", "", "a", 6, ""),
        ("abbbbbb", "a", "b", 6, ""),
        ("abababab", "", "ab", 4, ""),
        ("xxabcabcabcy", "xx", "abc", 3, "y"),
    ],
)
def test_layers_are_a_repeated_unit(names: str, head: str, unit: str, repeats: int, tail: str) -> None:
    found = pattern(tuple(names))
    assert found.layers(found.repeats) == tuple(names)
    assert (found.head, found.unit, found.repeats, found.tail) == (tuple(head), tuple(unit), repeats, tuple(tail))


def test_rows_of_many_pipelines_keep_their_places() -> None:
    """Classes of ranks are shared between pipelines of any length; every row comes back where it was."""
    structure = Structure(sharding="zero3")
    plans = [plan(structure, pp=p, dp_shard=d, accumulation=a) for d, p, a in ((1, 4, 8), (8, 2, 4), (2, 1, 2), (4, 4, 4), (2, 2, 8))]
    found = rows("llama", plans)
    for i, one in enumerate(plans):
        alone = rows("llama", [one])
        assert (alone.peak_bytes[0], alone.pipeline_rank[0]) == (found.peak_bytes[i], found.pipeline_rank[i])
        assert found.terms(i) == alone.terms(0)
