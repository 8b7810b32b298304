"""Every model of the catalogue: its parameters are the published ones to the last element, and its rows are a computation that runs."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright.catalog import tables
from trainwright.catalog.load import load_model
from trainwright.models import FAMILIES
from trainwright.spec.blocks import Block
from trainwright.spec.model import ModelSpec

ENTRIES: dict[str, Any] = tables.document("models.json")
NAMES = list(ENTRIES)
ONE_EACH = {entry["family"]: name for name, entry in ENTRIES.items()}


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_exact(name: str) -> None:
    assert load_model(name).parameters == ENTRIES[name]["parameters"]


@pytest.mark.parametrize("name", [n for n in NAMES if ENTRIES[n]["active"]])
def test_active_parameters_count_the_chosen_experts_embedding_and_head(name: str) -> None:
    assert load_model(name).active_parameters == ENTRIES[name]["active"]


@pytest.mark.parametrize("name", [n for n in NAMES if not ENTRIES[n]["active"]])
def test_a_dense_model_is_wholly_active(name: str) -> None:
    model = load_model(name)
    assert model.active_parameters <= model.parameters
    assert (model.active_parameters == model.parameters) == (not model.is_moe)


@pytest.mark.parametrize("name", [n for n in NAMES if ENTRIES[n]["published"]])
def test_a_published_count_is_met_or_the_entry_says_by_what_it_differs(name: str) -> None:
    entry, model = ENTRIES[name], load_model(name)
    difference = entry.get("difference", {})
    assert set(difference) <= {"router_bias"}
    assert difference.get("router_bias", 0) == (model.router_bias_elements if difference else 0)
    assert entry["published"] == model.parameters + sum(difference.values())
    if difference:
        assert entry["reason"]


@pytest.mark.parametrize("name", [n for n in NAMES if not ENTRIES[n]["published"]])
def test_a_model_without_a_published_count_says_so(name: str) -> None:
    assert len(ENTRIES[name]["reason"]) > 20


def stored_terms(model: ModelSpec) -> dict[str, int]:
    """What a checkpoint on the hub may hold beside the parameters."""
    table = model.vocab * model.hidden
    return {
        "head": table,  # the tied table a second time
        "rotary": model.num_layers * model.head_dim // 2,  # inverse frequencies of every layer
        "router_bias": model.router_bias_elements,
        "mtp": model.mtp_parameters,
        "mtp_copies": 2 * table,
        "mtp_router_bias": model.experts,
        "projector": 1152 * model.hidden + 1152,  # Gemma 3: a matrix and a norm after SigLIP of 1,152
    }


@pytest.mark.parametrize("name", [n for n in NAMES if "stored" in ENTRIES[n]])
def test_what_the_hub_stores_beyond_the_parameters_adds_up(name: str) -> None:
    model, stored = load_model(name), ENTRIES[name]["stored"]
    known = stored_terms(model)
    for term, elements in stored["terms"].items():
        assert term == "vision" or elements == known[term]
    assert model.parameters + sum(stored["terms"].values()) == stored["total"]


def test_the_vision_towers_are_one_size_each() -> None:
    """The same difference for every size of a series is evidence that the text part is exact."""
    sizes = [
        (ENTRIES[n]["family"], ENTRIES[n]["stored"]["terms"]["vision"])
        for n in NAMES
        if "vision" in ENTRIES[n].get("stored", {}).get("terms", {})
    ]
    assert sorted(set(sizes)) == [("gemma3", 416866032), ("llama4", 871932416)]
    assert len(sizes) == 5


def test_every_entry_has_a_source_and_a_family_that_builds_it() -> None:
    for name, entry in ENTRIES.items():
        assert entry["source"], name
        assert load_model(name).family == entry["family"]


def test_every_family_is_in_the_catalogue() -> None:
    assert set(FAMILIES) == set(ONE_EACH)


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_of_the_catalogue_assumes_nothing(name: str) -> None:
    assert load_model(name).notes == ()


def follow(block: Block, width: int) -> str:
    """Walks the rows as the forward pass would: every input exists, every product takes what its input has. Returns the last output."""
    made = {"x": width, "x_in": width}
    for op in block:
        for source in op.inputs:
            assert source in made, f"{block.name}.{op.name} reads {source}, which nothing wrote"
        if op.kind in ("linear", "router") and op.name != "eh_proj":
            (source,) = op.inputs
            assert made[source] == op.k, f"{block.name}.{op.name} takes {op.k}, {source} has {made[source]}"
        if op.kind == "grouped_linear":
            assert made[op.inputs[0]] == op.k
        if op.kind in ("add", "multiply"):
            assert {made[s] for s in op.inputs} <= {op.width, 1}
        if op.kind == "attention":
            assert op.width == op.heads * op.v_head_dim
            assert op.heads % op.kv_heads == 0
        for weight in op.weights:
            if op.kind in ("linear", "router") and len(weight.shape) == 2:
                assert weight.shape == (op.width, op.k)
            if op.kind == "grouped_linear":
                assert weight.shape[0] == op.experts
                assert weight.ep_dim == 0
        made[op.output] = op.width
        if op.kind == "rope":
            made["k_r"] = op.kv_heads * op.head_dim
    names = [w.name for w in block.weights]
    assert len(names) == len(set(names)), f"two weights of {block.name} have one name"
    return block.ops[-1].output


@pytest.mark.parametrize("name", NAMES)
def test_the_rows_are_a_computation(name: str) -> None:
    model = load_model(name)
    for block in (*model.blocks.values(), *model.mtp):
        follow(block, model.hidden)
    follow(model.embedding, 0)
    follow(model.head, model.hidden)
    for block in model.blocks.values():
        assert block.ops[-1].width == model.hidden
        assert block.ops[-1].region == "sequence"
    assert model.embedding.ops[-1].width == model.hidden
    assert [op.kind for op in model.head.ops[-2:]] == ["linear", "cross_entropy"]
    assert model.head.ops[-1].width == model.vocab


@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallelism_alternates(name: str) -> None:
    """A row-parallel product closes what column-parallel ones opened: its input lies in the tensor region, its output in the sequence region."""
    model = load_model(name)
    for block in model.blocks.values():
        made = {op.output: op for op in block}
        for op in block.rows("linear"):
            if op.parallel == "row":
                assert made[op.inputs[0]].region == "tensor"
                assert op.region == "sequence"
            elif op.parallel == "column":
                assert op.region == "tensor"


@pytest.mark.parametrize("name", NAMES)
def test_products_per_token_are_the_weights_of_products(name: str) -> None:
    """2 FLOPs a weight: the sum of k x width over the products of a token is the number of their active weights (head included, tied or not)."""
    model = load_model(name)
    table = model.embedding.weights[0].elements
    for block in (*model.blocks.values(), model.head):
        for op in block.rows("linear", "router"):
            main = next((w for w in op.weights if len(w.shape) == 2), None)
            assert op.k * op.width == (main.elements if main else table)
        for op in block.rows("grouped_linear"):
            main = next(w for w in op.weights if len(w.shape) == 3)
            assert op.top_k * op.k * op.width == main.elements * op.top_k // op.experts
