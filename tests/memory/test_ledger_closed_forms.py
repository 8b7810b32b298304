"""Activation memory of a Transformer layer in closed form (Korthikanti et al., arXiv:2205.05198, table 2), against the rows of the blocks.

s sequence, b micro-batch, h hidden, a heads, t tensor-parallel size; 16-bit activations, dropout 0.1 (one byte a mask element), scores
kept.
The paper leaves the statistics of the two norms out (8 bytes a token and norm): here they are counted apart.
"""

from __future__ import annotations

import numpy as np
import pytest

from trainwright.cost.ledger.activations import by_kernels, embedding_masks
from trainwright.cost.ledger.saved import kept_by, saved_by, size
from trainwright.cost.ledger.scope import Scope
from trainwright.cost.table import PlanTable
from trainwright.models import build_model
from trainwright.spec.cluster import ClusterSpec, GpuSpec
from trainwright.spec.job import TrainingJob
from trainwright.spec.plan import ParallelPlan, Structure

S, B, H, A = 2048, 3, 1920, 24
GPT = {"model_type": "gpt2", "n_layer": 8, "n_embd": H, "n_head": A, "n_positions": S, "vocab_size": 51200}
T = np.arange(1, 9)
T = T[A % T == 0]  # sizes that divide the heads: 1 2 3 4 6 8
GPU = GpuSpec(
    "A100", (), "NVIDIA", "SXM", "8.0", 108, {"bf16": 312e12}, 80, 81920 * 2**20, "HBM2e", 2e12, "NVLink", 300e9, 8, 8, 200, 32e9, 400
)
CLUSTER = ClusterSpec(GPU, 8, 8, 8, 25e9)


def scope(**choices: object) -> Scope:
    """Plans of tp = 1 2 3 4 6 8."""
    structure = Structure(framework="megatron", sharding="zero1", attention="eager", **choices)
    plans = [ParallelPlan(structure, tp=int(t), micro_batch_size=B) for t in T]
    job = TrainingJob(seq_len=S, global_batch_size=B, precision="bf16", dropout=0.1)
    return Scope(build_model(GPT, "gpt"), CLUSTER, job, structure, PlanTable.from_plans(plans))


def bytes_of_layer(found: Scope) -> np.ndarray:
    """Bytes that a layer keeps, without the statistics of its norms."""
    (kernels, _), *_ = by_kernels(found)
    kept = kept_by(found.model.blocks["layer"], kernels, found.structure, "core_attn")
    return np.sum([size(s, found) for s in kept if not s.tensor.endswith(":statistics")], axis=0)


def test_no_parallelism():
    assert bytes_of_layer(scope())[0] == S * B * H * (34 + 5 * A * S / H)


def test_tensor_parallelism():
    assert bytes_of_layer(scope()) == pytest.approx(S * B * H * (10 + 24 / T + 5 * A * S / (H * T)), rel=1e-15)


def test_tensor_and_sequence_parallelism():
    assert bytes_of_layer(scope(sequence_parallel=True)) == pytest.approx(S * B * H / T * (34 + 5 * A * S / H), rel=1e-15)


def test_selective_recomputation_drops_the_attention_core():
    assert bytes_of_layer(scope(recompute="selective")) == pytest.approx(S * B * H * (10 + 24 / T), rel=1e-15)
    assert bytes_of_layer(scope(recompute="selective", sequence_parallel=True)) == pytest.approx(S * B * H * 34 / T, rel=1e-15)


def test_full_recomputation_keeps_the_input():
    assert (bytes_of_layer(scope(recompute="full")) == 2 * S * B * H).all()
    assert bytes_of_layer(scope(recompute="full", sequence_parallel=True)) == pytest.approx(2 * S * B * H / T, rel=1e-15)


def test_statistics_of_norms_are_counted_apart():
    (kernels, _), *_ = by_kernels(found := scope(sequence_parallel=True))
    statistics = [s for s in saved_by(found.model.blocks["layer"], kernels) if s.tensor.endswith(":statistics")]
    assert len(statistics) == 2
    assert np.sum([size(s, found) for s in statistics], axis=0) == pytest.approx(2 * 8 * S * B / T)


def test_embedding_keeps_its_dropout_mask():
    """sbhp/t bytes of section 4.3, for one micro-batch."""
    assert embedding_masks(scope(sequence_parallel=True)) == pytest.approx(S * B * H / T)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_t_from_1_to_8_where_heads_and_tokens_divide(sequence_parallel: bool):
    """840 heads divide by every t; sizes are whole numbers, so equality is exact."""
    heads, hidden, seq = 840, 8400, 840
    model = build_model(GPT | {"n_embd": hidden, "n_head": heads, "n_positions": seq}, "gpt")
    structure = Structure(framework="megatron", sharding="zero1", attention="eager", sequence_parallel=sequence_parallel)
    table = PlanTable.from_plans([ParallelPlan(structure, tp=t, micro_batch_size=2) for t in range(1, 9)])
    found = Scope(model, CLUSTER, TrainingJob(seq, 2, dropout=0.1), structure, table)
    sbh, t = seq * 2 * hidden, np.arange(1, 9)
    scores = 5 * heads * seq * seq * 2
    expected = (34 * sbh + scores) // t if sequence_parallel else 10 * sbh + (24 * sbh + scores) // t
    assert bytes_of_layer(found).tolist() == expected.tolist()
