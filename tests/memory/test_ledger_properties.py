"""What holds of the ledger for any plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_runs import A100, LINEARS, LLAMA_2_7B, MEGATRON, SMALL, SMALL_MOE, cluster, job, ledger, plan

from trainwright.cost import tape
from trainwright.cost.ledger import memory_rows
from trainwright.cost.ledger.detail import LAYOUTS
from trainwright.cost.ledger.saved import Layout
from trainwright.cost.memory_table import PARTS, STATES
from trainwright.cost.table import PlanTable
from trainwright.frameworks import FRAMEWORKS
from trainwright.models import build_model
from trainwright.spec.job import TrainingJob
from trainwright.spec.plan import ParallelPlan

# ---- the tape, which is exact


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("tp", [1, 4])
def test_the_ledger_holds_what_the_tape_does(recompute: str, tp: int) -> None:
    """One layout that both know: FSDP2 with sequence parallelism, whose op list keeps what the reduce-scatters leave."""
    layout = plan(framework="fsdp2", sharding="zero3", recompute=recompute, sequence_parallel=tp > 1, dp_shard=8, tp=tp)
    table = PlanTable.from_plans([layout])
    asked = (build_model(SMALL, "m"), cluster(A100, layout.gpus), job(), layout.structure, table)
    assert memory_rows(*asked).peak_bytes[0] == pytest.approx(tape.memory_rows(*asked).peak_bytes[0], rel=0.02)


def test_every_layout_of_a_saved_tensor_has_its_formula() -> None:
    assert set(LAYOUTS) == set(get_args(Layout))


# ---- properties

FRAMEWORK = st.sampled_from(["megatron", "deepspeed", "fsdp1", "fsdp2", "ddp"])


@st.composite
def plans(draw: Any) -> tuple[dict, TrainingJob, ParallelPlan]:
    framework = draw(FRAMEWORK)
    rules = FRAMEWORKS[framework]
    megatron = framework == "megatron"
    moe = draw(st.booleans()) and framework != "ddp"
    tp = draw(st.sampled_from([1, 2, 4])) if megatron else 1
    pp = draw(st.sampled_from([1, 2, 3, 4])) if megatron and not moe else 1
    layout = plan(
        framework=framework,
        sharding=draw(st.sampled_from(rules.shardings)),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        attention=draw(st.sampled_from(["flash", "efficient", "eager"])),
        sequence_parallel=tp > 1,
        schedule=draw(st.sampled_from([s for s in rules.schedules if s in ("1f1b", "gpipe")] or ["1f1b"])),
        compile=draw(st.booleans()),
        dp_shard=draw(st.sampled_from([2, 4, 8])),
        tp=tp,
        pp=pp,
        ep=2 if moe and megatron else 1,
        micro_batch_size=draw(st.integers(1, 4)),
        accumulation=draw(st.sampled_from([1, 4, 9])),
    )
    work = job(
        draw(st.sampled_from([512, 1000, 2048])),
        precision=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        method=draw(st.sampled_from(["full", "full", "lora", "qlora"])),
        lora_targets=LINEARS,
        base_quantization="nf4",
        loss=draw(st.sampled_from(["plain", "chunked", "fused", "vocab-parallel"])),
        optimizer=draw(st.sampled_from(["adamw", "adam8bit", "sgd_momentum", "adafactor", "muon", "lion"])),
        dropout=draw(st.sampled_from([0.0, 0.1])),
    )
    return (SMALL_MOE if moe else SMALL), work, layout


@settings(max_examples=60, deadline=None)
@given(plans())
def test_parts_sum_to_the_peak_and_terms_and_timeline_agree(case: tuple):
    config, work, layout = case
    found = ledger(config, work, layout)
    assert sum(int(found.breakdown[part][0]) for part in PARTS) == found.peak_bytes[0]
    assert sum(t.bytes for t in found.terms(0)) == found.peak_bytes[0]
    timeline = found.timeline(0)
    assert max(m.bytes for m in timeline) == found.peak_bytes[0]
    assert found.moment(0) in {m.name for m in timeline}
    for phase, column in found.phases.items():
        assert column[0] == max(m.bytes for m in timeline if m.phase == phase)


@settings(max_examples=60, deadline=None)
@given(plans())
def test_more_shards_never_mean_more_state(case: tuple):
    config, work, layout = case
    few, many = ledger(config, work, layout), ledger(config, work, replace(layout, dp_shard=2 * layout.dp_shard))
    for state in STATES:
        assert many.states[state][0] <= few.states[state][0], state


@settings(max_examples=60, deadline=None)
@given(plans())
def test_a_larger_micro_batch_never_needs_less(case: tuple):
    config, work, layout = case
    found = ledger(config, work, *[replace(layout, micro_batch_size=m) for m in (1, 2, 3, 5, 8)])
    assert (np.diff(found.peak_bytes) >= 0).all()
    same_rank = np.diff(found.pipeline_rank) == 0
    assert (np.diff(found.saved_bytes)[same_rank] > 0).all()
    assert (np.diff(found.extra["pooled_bytes"]) >= 0).all()


@settings(max_examples=40, deadline=None)
@given(plans())
def test_recomputation_never_keeps_more(case: tuple):
    """On one stage: `saved_bytes` are the fullest rank's, and which rank that is may change with recomputation."""
    config, work, layout = case
    layout = replace(layout, pp=1, virtual_stages=1)
    structures = [replace(layout.structure, recompute=r) for r in ("full", "selective", "none")]
    saved = [ledger(config, work, replace(layout, structure=s)).saved_bytes[0] for s in structures]
    assert saved[0] <= saved[1] or work.method != "full"
    assert saved[0] <= saved[2]


@settings(max_examples=40, deadline=None)
@given(plans())
def test_a_row_of_a_table_is_the_row_alone(case: tuple):
    config, work, layout = case
    rows = [replace(layout, micro_batch_size=m, dp_shard=d) for m in (1, 3) for d in (1, 8)]
    table = ledger(config, work, *rows)
    for i, row in enumerate(rows):
        alone = ledger(config, work, row)
        assert alone.peak_bytes[0] == table.peak_bytes[i]
        assert alone.saved_bytes[0] == table.saved_bytes[i]
        assert {k: v[0] for k, v in alone.breakdown.items()} == {k: v[i] for k, v in table.breakdown.items()}
        assert {k: v[0] for k, v in alone.extra.items()} == {k: v[i] for k, v in table.extra.items()}


def test_chunks_of_a_long_table_change_nothing(monkeypatch: pytest.MonkeyPatch):
    rows = [plan(**MEGATRON, tp=t, pp=p, micro_batch_size=m, accumulation=8) for t in (1, 2) for p in (1, 2, 4) for m in (1, 2, 3)]
    whole = ledger(SMALL, job(), *rows)
    monkeypatch.setattr("trainwright.cost.ledger.engine.CHUNK", 4)
    parts = ledger(SMALL, job(), *rows)
    assert whole.peak_bytes.tolist() == parts.peak_bytes.tolist()
    assert [whole.terms(i) for i in (0, 9)] == [parts.terms(i) for i in (0, 9)]


def test_plans_that_share_a_shape_are_computed_once_and_alike():
    """Rows that differ in depth, replicas and accumulation only share the pieces; each still equals its own row."""
    rows = [plan(**MEGATRON, tp=2, pp=p, dp_shard=d, accumulation=a) for p in (1, 2, 3, 4) for d in (1, 2, 4, 8) for a in (2, 16)]
    table = ledger(SMALL, job(), *rows)
    alone = [int(ledger(SMALL, job(), row).peak_bytes[0]) for row in rows]
    assert table.peak_bytes.tolist() == alone
    assert len(set(alone)) > 10


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe", "dualpipe-v", "v-half", "eager-1f1b"])
def test_every_schedule_has_an_answer(schedule: str):
    """GPipe holds every micro-batch, 1F1B as many as there are stages; a V schedule halves what 1F1B's first rank holds."""
    layout = plan(**MEGATRON, schedule=schedule, pp=4, virtual_stages=1, accumulation=16)
    found = ledger(SMALL | {"num_hidden_layers": 16}, job(), layout)
    one = ledger(SMALL | {"num_hidden_layers": 16}, job(), plan(**MEGATRON, schedule="1f1b", pp=4, accumulation=16))
    ratio = found.breakdown["activations"][0] / one.breakdown["activations"][0]
    low, high = {"gpipe": (3.5, 4.2), "eager-1f1b": (1.5, 1.9), "v-half": (0.6, 0.95), "dualpipe": (0.9, 1.4)}.get(schedule, (0.8, 1.3))
    assert low < ratio < high


def test_a_stage_of_torch_pipelining():
    """Llama-2-7B over 4 stages, 8 micro-batches of 1,024 tokens, bf16: rank 0 peaks at 20,336,485,924 bytes (torch 2.13, fake tensors),
    within 0.1 %.
    """
    layout = plan(framework="fsdp2", sharding="none", pp=4, accumulation=8)
    found = ledger(LLAMA_2_7B, job(1024, master_weights="none", gradient_dtype="bf16"), layout)
    assert found.peak_bytes[0] == pytest.approx(20_336_485_924, rel=1e-3)
    assert found.pipeline_rank[0] == 0
