"""Counts of FLOPs against published closed forms: the forms are never code, only tests of the table of rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cost.flops import causal_pairs, conventions, flops, forward_flops, model_flops
from trainwright.cost.table import PlanTable
from trainwright.errors import SpecError
from trainwright.spec.plan import Structure

from .parts import gpt, job, llama, plan


@given(
    layers=st.integers(1, 8),
    heads=st.integers(1, 8),
    width=st.sampled_from([64, 128]),
    seq=st.sampled_from([256, 2048]),
    batch=st.integers(1, 9),
)
def test_megatron_formula(layers: int, heads: int, width: int, seq: int, batch: int) -> None:
    """72 B s l h^2 (1 + s/6h + V/12lh), arXiv:2104.04473 equation 3 without the recomputed pass; with it 96 B s l h^2 (1 + s/6h + V/16lh)."""
    hidden, vocab = heads * width, 51200
    model, what = gpt(layers, hidden, heads, vocab), job(seq, batch)
    without = 72 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    full = 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    assert conventions(model, what, plan(), "megatron") == pytest.approx(without, rel=1e-12)
    again = plan(structure=Structure(framework="megatron", sharding="zero1", recompute="full"))
    assert conventions(model, what, again, "megatron") == pytest.approx(full, rel=1e-12)


def test_gpt3_needs_3640_petaflop_s_days() -> None:
    """GPT-3 175B: 3.14e23 FLOPs over 300e9 tokens (arXiv:2005.14165, appendix D: 6 N D without attention and embeddings)."""
    model, what = gpt(96, 12288, 96, 50257), job(2048, 1536)
    steps = 300e9 / what.tokens_per_step
    assert conventions(model, what, plan(), "6N") * steps == pytest.approx(3.14e23, rel=0.01)


def test_palm_convention_is_6n_plus_12lhqt() -> None:
    model, what = llama(), job(8192, 4)
    matrices = model.parameters - model.vocab * model.hidden
    assert conventions(model, what, plan(), "palm") == (6 * matrices + 12 * 32 * 32 * 128 * 8192) * what.tokens_per_step


def test_causal_attention_is_half_of_the_square() -> None:
    model = llama(layers=3)
    what = job(4096, 2)
    whole, half = (model_flops(model, what, causal_half=c) for c in (False, True))
    assert whole - half == 3 * (3 * 2 * 2 * 32 * 128 * 4096**2 / 2) * 2


@pytest.mark.parametrize(("window", "pairs"), [(None, 512 * 512 / 2), (512, 512 * 512 / 2), (128, 128 * 512 - 128**2 / 2)])
def test_a_window_bounds_the_pairs(window: int | None, pairs: float) -> None:
    assert causal_pairs(512.0, window) == pairs


def test_packing_makes_attention_block_diagonal() -> None:
    """k documents of s/k tokens have 1/k of the pairs."""
    model = llama(layers=1)
    block = model.blocks["layer"]
    linear = forward_flops(block, job(8192, 1)) - (whole := 2 * 2 * 32 * 128 * 8192**2 / 2)
    assert forward_flops(block, job(8192, 1, packing=True, mean_document_len=1024)) == pytest.approx(linear + whole / 8)


def test_forward_and_backward_is_6_for_each_parameter_in_a_product() -> None:
    """6 FLOPs a token for each weight of a product; the embedding's table is none, the head's is."""
    model = gpt(2, 256, 4, 1000)
    what = job(64, 1)
    products = 2 * 12 * 256**2 + 1000 * 256
    core = 3 * 2 * 2 * 2 * 256 * 64 * 64 / 2
    assert model_flops(model, what) == 6 * products * 64 + core


def test_lora_has_no_weight_gradients_of_the_base() -> None:
    model = llama(layers=2)
    full = model_flops(model, job(1024, 1))
    lora = model_flops(model, job(1024, 1, method="lora", lora_rank=8, lora_targets=("q_proj",)))
    assert 0.66 * full < lora < 0.72 * full


def test_hardware_flops_add_what_is_recomputed() -> None:
    """Full recomputation repeats the layers' forward pass; a checkpoint that stops early leaves out the last product (2 h x 4h a token of 24 h^2)."""
    model, what = gpt(4, 1024, 8), job(2048, 8)
    layers = 4 * forward_flops(model.blocks["layer"], what) * 8
    kinds = {name: Structure(framework=name, sharding="zero1", recompute="full") for name in ("megatron", "fsdp1")}
    megatron, early = (flops(model, what, PlanTable.from_plans([plan(8, structure=s)])) for s in kinds.values())
    assert float(megatron.hardware[0] - megatron.model[0]) == pytest.approx(layers)
    last = 4 * 2 * 2048 * 1024 * 4096 * 8
    assert float(early.hardware[0] - early.model[0]) == pytest.approx(layers - last)


def test_an_unknown_convention_names_the_known_ones() -> None:
    with pytest.raises(SpecError, match="palm"):
        conventions(gpt(1, 64, 1), job(), plan(), "plam")
