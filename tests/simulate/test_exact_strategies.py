"""Every strategy, every pair of strategies, 1 to 8 ranks, sizes that do not divide: what one device computes, and the bytes of the formulas."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import DENSE, DROPS, GPT, MODELS, MOE, check

from trainwright import simulate
from trainwright.errors import SpecError
from trainwright.schedules import SCHEDULES
from trainwright.schedules.torch_csv import read_csv
from trainwright.simulate.check import compare
from trainwright.simulate.fsdp import Optimizer
from trainwright.simulate.layout import Layout
from trainwright.simulate.traffic import expected

BY_RANKS = {
    "data parallel": lambda n: Layout(dp_replicate=n),
    "ZeRO-1": lambda n: Layout(dp_shard=n, zero=1),
    "ZeRO-2": lambda n: Layout(dp_shard=n, zero=2),
    "ZeRO-3": lambda n: Layout(dp_shard=n, zero=3),
    "tensor": lambda n: Layout(tp=n),
    "sequence": lambda n: Layout(tp=n, sequence_parallel=n > 1),
    "context": lambda n: Layout(cp=n),
    "pipeline": lambda n: Layout(pp=n, microbatches=9),
}


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("strategy", BY_RANKS)
def test_a_strategy_on_1_to_8_ranks(strategy, ranks):
    config = replace(DENSE, layers=6) if strategy == "pipeline" else DENSE
    check(config, BY_RANKS[strategy](ranks), length=17 if strategy == "context" else 7)


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("model", ["moe", "drops"])
def test_experts_on_1_to_8_ranks(model, ranks):
    check(MODELS[model], Layout(dp_replicate=ranks, ep=ranks))


# Every entry may join every other: a few fields of a layout each.
PARTS = {
    "data": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero": 1},
    "zero2": {"dp_shard": 2, "zero": 2},
    "zero3": {"dp_shard": 2, "zero": 3},
    "tensor": {"tp": 3},
    "sequence": {"tp": 2, "sequence_parallel": True},
    "context": {"cp": 2},
    "pipeline": {"pp": 2, "microbatches": 4},
    "split backward": {"pp": 2, "microbatches": 4, "schedule": "zb-h1"},
    "experts": {"ep": 2},
    "accumulation": {"microbatches": 3},
    "recompute": {"recompute": "full", "recompute_every": 2},
    "selective": {"recompute": "selective", "flash": False},
    "optimizer offload": {"offload": "optimizer"},
    "parameter offload": {"offload": "parameters"},
}


def pair(first: str, second: str) -> dict[str, object]:
    fields: dict[str, object] = {**PARTS[first], **PARTS[second]}
    if "experts" in (first, second) and not {"dp_replicate", "dp_shard", "cp"} & fields.keys():
        fields["dp_replicate"] = 2  # experts are spread over ranks with different tokens
    return fields


@pytest.mark.parametrize(("first", "second"), list(combinations(PARTS, 2)), ids=lambda n: n)
def test_every_pair(first, second):
    model = MOE if "experts" in (first, second) else GPT if len(first + second) % 2 else DENSE
    check(model, Layout(**pair(first, second)), padded=True, steps=3)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["dense", "gpt"])
def test_every_schedule(schedule, model):
    config = replace(MODELS[model], layers=4)
    layout = Layout(pp=2, microbatches=6, schedule=schedule)
    found = check(config, layout, batch=6, length=5, steps=3)
    assert found.distributed.losses[0] != found.distributed.losses[1]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe"])
def test_schedules_with_sharding_and_tensor_parallelism(schedule):
    check(GPT, Layout(pp=2, microbatches=4, schedule=schedule, dp_shard=2, zero=3, tp=2, sequence_parallel=True), batch=9, steps=3)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2, zero=3, tp=2, sequence_parallel=True, pp=2, cp=2, microbatches=2),
        Layout(dp_replicate=2, dp_shard=2, zero=2, tp=2, pp=2, microbatches=2, recompute="full"),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_four_dimensions(layout, model):
    ep = 2 if MODELS[model].experts else 1
    check(MODELS[model], replace(layout, ep=ep), steps=3)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("config", [DENSE, MOE, DROPS], ids=["dense", "moe", "drops"])
def test_hsdp(zero, config):
    check(config, Layout(dp_replicate=2, dp_shard=3, zero=zero, microbatches=1, ep=3 if config.experts else 1))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_layout_is_one_device(data):
    """Layouts and sizes at random: exact and counted, or refused with a reason."""
    draw = data.draw
    model = draw(st.sampled_from(list(MODELS)))
    zero = draw(st.sampled_from([0, 0, 1, 2, 3]))
    tp = draw(st.integers(1, 3))
    layout = Layout(
        dp_replicate=draw(st.integers(1, 2)),
        dp_shard=draw(st.integers(1, 3)) if zero else 1,
        zero=zero,
        tp=tp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        pp=draw(st.integers(1, 2)),
        cp=draw(st.integers(1, 2)),
        ep=draw(st.integers(1, 2)),
        microbatches=draw(st.integers(1, 3)),
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        recompute_every=draw(st.integers(1, 2)),
        flash=draw(st.booleans()),
        cp_balance=draw(st.booleans()),
        cp_kind=draw(st.sampled_from(["ring", "allgather", "ulysses"])),
        reshard_after_forward=draw(st.booleans()),
        bucket_bytes=draw(st.sampled_from([0, 1000, 10**6])),
    )
    batch, length = draw(st.integers(1, 11)), draw(st.integers(1, 11))
    if layout.world_size > 16:
        return
    try:
        check(MODELS[model], layout, batch=batch, length=length, steps=2)
    except SpecError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_more_tensor_ranks_than_key_value_heads(ranks, sequence_parallel):
    """Neighbors hold copies of one key-value head, each with part of its queries; the copies' gradients are added."""
    config = replace(DENSE, heads=8, kv_heads=2, bias=True)
    found = check(config, Layout(tp=ranks, sequence_parallel=sequence_parallel, dp_shard=2, zero=3, cp=2), length=9, steps=3)
    assert bool(found.distributed.traffic.bytes_by_rank("tp copies")) == (ranks > 2)


def test_heads_that_cannot_be_spread_name_the_nearest_ranks():
    config = replace(DENSE, heads=8, kv_heads=2)
    with pytest.raises(SpecError, match=r"8 heads with 2 key-value heads cannot be spread over 3 .*\(nearest: 1, 2, 4\)"):
        check(config, Layout(tp=3))


@pytest.mark.parametrize("kind", ["allgather", "ulysses"])
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_other_context_parallelism(kind, ranks):
    check(DENSE, Layout(cp=ranks, cp_kind=kind), length=17, steps=3)


@pytest.mark.parametrize("kind", ["allgather", "ulysses"])
@pytest.mark.parametrize("model", MODELS)
def test_other_context_parallelism_with_the_rest(kind, model):
    layout = Layout(
        cp=2,
        cp_kind=kind,
        tp=2,
        sequence_parallel=True,
        pp=2,
        dp_shard=2,
        zero=3,
        microbatches=2,
        recompute="full",
        ep=2 if MODELS[model].experts else 1,
    )
    check(MODELS[model], layout, steps=2)


def test_ulysses_needs_heads():
    with pytest.raises(SpecError, match="2 key-value heads of a tensor-parallel rank over 3"):
        check(DENSE, Layout(tp=4, cp=3, cp_kind="ulysses"))


def test_a_schedule_of_ones_own(tmp_path):
    """PyTorch's per-rank lists, read from a file: an order that no registered schedule has, on real numbers."""
    lists = "0F0,0F1,0I0,0I1,0W1,0W0\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    found = check(DENSE, Layout(pp=2, microbatches=2, schedule=read_csv(lists, "mine")), steps=3)
    assert found.distributed.losses[0] != found.distributed.losses[1]
    with pytest.raises(SpecError, match="mine is for 2 ranks and 2 microbatches, not 2 and 4"):
        check(DENSE, Layout(pp=2, microbatches=4, schedule=read_csv(lists, "mine")))
    file = tmp_path / "mine.csv"
    file.write_text(lists)
    report = simulate.pipeline(schedule=str(file), batch=4, steps=1)
    assert report.figures["ranks"] == 2
    assert report.figures["relative_error"]["gradients"] < 1e-12


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_replicate=3),
        Layout(dp_replicate=2, dp_shard=2, zero=3),
        Layout(tp=4),
        Layout(pp=2, microbatches=4, schedule="dualpipe"),
        Layout(dp_shard=2, zero=2, tp=2, sequence_parallel=True, pp=2, cp=2, microbatches=2),
    ],
)
@pytest.mark.parametrize("model", ["gpt", "moe", "kv"])
def test_clipping_by_the_norm_of_the_whole_gradient(layout, model):
    """The norm counts every weight once: not replicas, not what all tensor-parallel ranks hold, not a tied weight on two stages."""
    config = replace(DENSE, kv_heads=2) if model == "kv" else MODELS[model]
    layout = replace(layout, ep=2) if model == "moe" and layout.data_ranks % 2 == 0 else layout
    clipped = Optimizer("sgd", rate=0.5, clip=0.05)
    found = compare(config, layout, batch=9, length=7, steps=3, optimizer=clipped)
    free = compare(config, Layout(), batch=9, length=7, steps=3, optimizer=replace(clipped, clip=0.0))
    assert found.difference.relative < 1e-12
    assert abs(found.single.losses[-1] - free.single.losses[-1]) > 1e-4, "the limit must bind"
    formula = expected(config, layout, 0, batch=9, length=7, steps=3, routes=found.distributed.routing, clip=True)
    assert formula.get(("norm", "all_reduce"), 0) == found.distributed.traffic.bytes_by_rank("norm").get(0, 0)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_gradients_by_tree(ranks):
    check(DENSE, Layout(dp_replicate=ranks, all_reduce="tree", bucket_bytes=3000), steps=2)
