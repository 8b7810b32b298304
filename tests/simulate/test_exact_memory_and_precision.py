"""What is held: nothing leaks, recomputation and offload keep what the formulas say. What rounding does: to values, to gradients, to training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import DENSE, GPT, MOE, check

from trainwright.errors import SpecError
from trainwright.schedules.replay import schedule
from trainwright.simulate.data import capacity_groups
from trainwright.simulate.expert import within_capacity
from trainwright.simulate.fsdp import Optimizer
from trainwright.simulate.layout import Layout
from trainwright.simulate.model import TinyConfig, random_batch
from trainwright.simulate.offload import transfers
from trainwright.simulate.precision import Policy, limits, rounded, scaled, train
from trainwright.simulate.recompute import saved_elements

LEARNER = TinyConfig(layers=1, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=32, vocab=16)
BATCHES = [random_batch(LEARNER, 4, 8, seed) for seed in range(4)]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2, zero=3, tp=2, pp=2, microbatches=4),
        Layout(dp_shard=2, zero=1, pp=2, microbatches=4, schedule="zb-h1"),
        Layout(dp_replicate=2, recompute="full", recompute_every=2),
        Layout(dp_shard=2, zero=2, offload="activations"),
        Layout(pp=2, microbatches=4, schedule="dualpipe"),
    ],
)
def test_nothing_is_left_after_a_step(layout):
    found = check(DENSE, layout, steps=2)
    for ledger in found.distributed.ledgers:
        assert ledger.held == ledger.moments[0][1]
        assert min(min(held.values()) for _, held in ledger.moments) >= 0


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    tp=st.integers(1, 3),
    sequence=st.booleans(),
    flash=st.booleans(),
    recompute=st.sampled_from(["none", "selective", "full"]),
    gpt=st.booleans(),
    length=st.integers(2, 9),
)
def test_what_a_block_keeps_is_the_formula(tp, sequence, flash, recompute, gpt, length):
    """Offloaded activations cross the link: the counted bytes are measured on the backward functions, the formula is `recompute.saved_elements`."""
    layout = Layout(tp=tp, sequence_parallel=sequence and tp > 1, flash=flash, recompute=recompute, offload="activations")
    check(GPT if gpt else DENSE, layout, batch=2, length=length, steps=1)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("config", [DENSE, GPT, MOE], ids=["dense", "gpt", "moe"])
def test_recomputation_changes_no_bit(recompute, config):
    found = check(config, Layout(recompute=recompute, flash=False), steps=2)
    plain = check(config, Layout(flash=False), steps=2)
    assert all((found.distributed.gradients[n] == plain.distributed.gradients[n]).all() for n in plain.distributed.gradients)


def test_where_an_offload_hides():
    found = {(t.what, t.moves, t.beside): t for t in transfers(7e9, 8, 8192, 400e12, hidden=4096, layers=32)}
    weights = found["parameters", "weights from the host", "forward"]
    assert weights.hides_at_bytes_per_s == pytest.approx(400e12 / (8 * 8192))  # F / (n T)
    assert found["optimizer", "gradients to the host", "backward"].hides_at_bytes_per_s == pytest.approx(400e12 / (2 * 8 * 8192))
    assert weights.exposed_s(weights.hides_at_bytes_per_s) == pytest.approx(0, abs=1e-12)
    assert weights.exposed_s(weights.hides_at_bytes_per_s / 2) == pytest.approx(weights.window_s)
    twice = {(t.what, t.moves, t.beside): t for t in transfers(7e9, 8, 16384, 400e12, hidden=4096, layers=32)}
    key = ("activations", "saved tensors to the host", "forward")
    assert twice[key].hides_at_bytes_per_s == pytest.approx(found[key].hides_at_bytes_per_s)  # not a matter of the batch
    with pytest.raises(SpecError, match="tokens"):
        transfers(7e9, 8, 0, 400e12, hidden=4096, layers=32)


# --- routing -----------------------------------------------------------------------------------------------------------------------------------


@given(tokens=st.integers(1, 40), experts=st.integers(1, 6), factor=st.floats(0.1, 2.0), seed=st.integers(0, 9))
def test_capacity_is_first_come_first_served_in_every_group(tokens, experts, factor, seed):
    random = np.random.default_rng(seed)
    top_k = random.integers(1, experts + 1)
    chosen = np.argsort(random.random((tokens, experts)), axis=1)[:, :top_k]
    groups = random.integers(0, 3, tokens)
    keep, _ = within_capacity(chosen, groups, experts, top_k, factor)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        capacity = int(np.ceil(factor * len(rows) * top_k / experts))
        for expert in range(experts):
            kept = keep[rows][chosen[rows] == expert]
            assert kept.sum() == min(capacity, len(kept))
            assert (np.diff(kept.astype(int)) <= 0).all(), "the first ones are kept"


def test_capacity_groups_cover_the_batch():
    groups = capacity_groups(Layout(dp_replicate=2, cp=2, microbatches=2), 9, 7)
    assert sorted(np.unique(groups)) == list(range(8))


# --- precision ---------------------------------------------------------------------------------------------------------------------------------


def test_formats_are_the_standards():
    assert limits("fp16") == {"max": 65504.0, "smallest_normal": 2.0**-14, "smallest": 2.0**-24, "eps": 2.0**-10}
    assert limits("bf16")["max"] == pytest.approx(3.3895e38, rel=1e-4)
    assert limits("bf16")["eps"] == 2.0**-7
    assert limits("fp8-e4m3")["max"] == 448
    assert limits("fp8-e5m2")["max"] == 57344


@pytest.mark.parametrize(("form", "digits"), [("fp16", 10), ("bf16", 7), ("fp8-e4m3", 3), ("fp8-e5m2", 2)])
def test_rounding_is_to_nearest_even(form, digits):
    step = 2.0**-digits
    values = np.array([1 + step, 1 + step / 2, 1 + 1.5 * step, 1 + 0.49 * step], np.float32)
    assert rounded(values, form).tolist() == [1 + step, 1, 1 + 2 * step, 1]


def test_beyond_the_range_is_infinity_and_below_is_zero():
    assert np.isinf(rounded(np.float32(70000), "fp16"))
    assert rounded(np.float32(70000), "bf16") == 70144
    assert rounded(np.float32(2.0**-26), "fp16") == 0
    assert rounded(np.float32(2.0**-26), "bf16") == np.float32(2.0**-26)


def test_a_scale_per_tensor_keeps_small_tensors():
    small = np.float32([1e-6, -3e-6, 2e-6])
    assert (rounded(small, "fp8-e4m3") == 0).all()
    np.testing.assert_allclose(scaled(small, "fp8-e4m3"), small, rtol=0.07)


@pytest.fixture(scope="module")
def trained():
    adam = Optimizer(rate=1e-3)
    policies = {
        "fp32": Policy("fp32"),
        "masters": Policy("bf16"),
        "no masters": Policy("bf16", master=False),
        "unscaled": Policy("fp16", tokens=2**20),
        "static": Policy("fp16", scale=2.0**16, tokens=2**20),
        "dynamic": Policy("fp16", scale=0.0, first_scale=2.0**34, growth_every=20, tokens=2**20),
        "too high": Policy("fp16", scale=2.0**40, tokens=2**20),
    }
    return {name: train(LEARNER, policy, BATCHES, 160, optimizer=adam) for name, policy in policies.items()}


def last(record):
    return float(np.mean(record.losses[-4:]))


def test_master_weights_keep_small_updates(trained):
    assert last(trained["masters"]) == pytest.approx(last(trained["fp32"]), rel=0.02)
    assert last(trained["no masters"]) > 1.15 * last(trained["fp32"])
    assert trained["no masters"].lost_updates > 0.5
    assert trained["masters"].lost_updates == 0


def test_a_loss_scale_keeps_small_gradients(trained):
    assert trained["unscaled"].underflow_share > 0.1
    assert trained["static"].underflow_share < 0.01
    assert last(trained["static"]) == pytest.approx(last(trained["fp32"]), rel=0.02)
    assert last(trained["unscaled"]) > last(trained["static"]) * 1.02


def test_the_dynamic_scale_backs_off_and_grows(trained):
    record = trained["dynamic"]
    assert record.skipped
    for step, (now, following) in enumerate(zip(record.scales, record.scales[1:], strict=False), 1):
        assert following in ((now / 2,) if step in record.skipped else (now, 2 * now))
    assert record.scales[-1] < record.scales[0]
    assert any(b == 2 * a for a, b in zip(record.scales, record.scales[1:], strict=False))


def test_a_static_scale_that_overflows_skips_every_step(trained):
    record = trained["too high"]
    assert len(record.skipped) == 160
    assert record.losses[0] == pytest.approx(record.losses[4])  # the same batch, the same weights


@pytest.mark.slow
def test_masters_against_none_over_1000_steps():
    masters, none = (train(LEARNER, Policy("bf16", master=m), BATCHES, 1000, optimizer=Optimizer(rate=1e-3)) for m in (True, False))
    assert last(none) > 3 * last(masters)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_executed_peaks_are_the_replays(name):
    """Ranks 1 and 2 of 4 hold blocks only: what they keep at most, in microbatches, is what the replay of the same lists says."""
    config = replace(DENSE, layers=10)
    found = check(config, Layout(pp=4, microbatches=8, schedule=name), batch=8, length=6, steps=1)
    one_microbatch = 3 * saved_elements(config, Layout(), 6, 6) * 8
    peaks = schedule(name, stages=4, microbatches=8).peak_per_rank
    assert [found.distributed.ledgers[rank].most["activations"] / one_microbatch for rank in (1, 2)] == peaks[1:3]
