"""Every model of the catalogue through the ledger, and Megatron's recompute modules on latent attention and experts."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest

from trainwright.catalog.known_models import load_model, model_rows
from trainwright.cost.ledger import memory_rows
from trainwright.cost.ledger.activations import by_kernels
from trainwright.cost.ledger.saved import layouts, saved_by
from trainwright.cost.ledger.scope import Scope
from trainwright.cost.memory_table import MemoryTable
from trainwright.cost.table import PlanTable
from trainwright.frameworks import FRAMEWORKS
from trainwright.spec.cluster import ClusterSpec, GpuSpec
from trainwright.spec.job import TrainingJob
from trainwright.spec.model import ModelSpec
from trainwright.spec.plan import ParallelPlan, Structure

GPU = GpuSpec(
    "H100", (), "NVIDIA", "SXM", "9.0", 132, {"bf16": 989e12}, 80, 81559 * 2**20, "HBM3", 3.35e12, "NVLink", 450e9, 8, 8, 400, 64e9, 700
)
CLUSTER = ClusterSpec(GPU, 1, 8, 8, 50e9)
JOB = TrainingJob(2048, 8)
IDS = sorted(model_rows())
ONE_OF_EACH_FAMILY = sorted({load_model(i).family: i for i in reversed(IDS)}.values())


@cache
def model(name: str) -> ModelSpec:
    return load_model(name)


def ledger(name: str, **choices: object) -> MemoryTable:
    layout = ParallelPlan(Structure(**choices), dp_shard=8)
    return memory_rows(model(name), CLUSTER, JOB, layout.structure, PlanTable.from_plans([layout]))


@pytest.mark.parametrize("name", IDS)
def test_states_of_every_model_are_its_parameters(name: str):
    """2 + 4 + 12/8 bytes a parameter, the vocabulary padded to a multiple of 128 and multi-token prediction included."""
    found, spec = ledger(name, framework="megatron", sharding="zero1"), model(name)
    padding = (-spec.vocab % 128) * spec.hidden * (1 if spec.tied else 2)
    states = sum(int(c[0]) for c in found.states.values())
    assert states == pytest.approx(7.5 * (spec.parameters + spec.mtp_parameters + padding), rel=0.002)
    per_layer = found.saved_bytes[0] / spec.num_layers / JOB.seq_len / spec.hidden
    assert 8 < per_layer < 200  # bytes a token and hidden unit: a thin dense layer to one that copies each token to many experts


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_every_family_in_every_framework(name: str, framework: str):
    sharding = FRAMEWORKS[framework].shardings[-1]
    kept = [ledger(name, framework=framework, sharding=sharding, recompute=r) for r in ("full", "none")]
    assert 0 < kept[0].saved_bytes[0] < kept[1].saved_bytes[0]
    assert sum(t.bytes for t in kept[1].terms(0)) == kept[1].peak_bytes[0]


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_what_is_saved_is_made_by_a_row_or_named_after_one(name: str):
    layout = ParallelPlan(Structure(framework="megatron", sharding="zero1"), dp_shard=8)
    scope = Scope(model(name), CLUSTER, JOB, layout.structure, PlanTable.from_plans([layout]))
    kernels = by_kernels(scope)[0][0]
    for block in scope.model.blocks.values():
        known = set(layouts(block, kernels.rules)) | {t for op in block.ops for t in op.inputs} | {op.name for op in block.ops}
        assert {s.tensor.split(":")[0] for s in saved_by(block, kernels)} <= known


MODULES = ("core_attn", "mla_up_proj", "layernorm", "mlp", "moe", "moe_act", "shared_experts")


def test_each_recompute_module_drops_its_own():
    """DeepSeek-V3: every module of ``--recompute-modules`` saves memory, two save no less than one, and full recomputation saves most."""

    def saved(*modules: str) -> int:
        choices = {"recompute": "selective", "recompute_modules": modules} if modules else {"recompute": "none"}
        return int(ledger("deepseek-v3", framework="megatron", sharding="zero1", **choices).saved_bytes[0])

    alone = {m: saved(m) for m in MODULES}
    assert all(size < saved() for size in alone.values()), alone
    for a, b in combinations(MODULES, 2):
        assert saved(a, b) <= min(alone[a], alone[b])
    assert alone["moe"] < alone["moe_act"]
    assert alone["moe"] < alone["shared_experts"]
    full = ledger("deepseek-v3", framework="megatron", sharding="zero1", recompute="full").saved_bytes[0]
    assert full < saved(*MODULES)
