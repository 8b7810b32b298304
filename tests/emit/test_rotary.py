"""The rotary base and scaling that reach Megatron are those that the model was made with, not Megatron's own 10,000."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from trainwright.emit import emit
from trainwright.emit.megatron_model import FAMILIES, rope
from trainwright.emit.shell import flags_of

from .cases import run_of

CATALOG = resources.files("trainwright.catalog")
ROWS = json.loads((CATALOG / "models.json").read_text(encoding="utf-8"))


def flags(model) -> dict[str, list[str]]:
    run = run_of({"model": model, "strategy": {"framework": "megatron", "recompute": "full"}})
    return flags_of(emit(run, "megatron")["launch.sh"])


@pytest.mark.parametrize(
    ("model", "base", "factor"),
    [
        ("llama-2-7b", "10000", None),
        ("llama-3-8b", "500000", None),
        ("llama-3.1-8b", "500000", "8.0"),
        ("llama-3.2-1b", "500000", "32.0"),
        ("qwen2.5-7b", "1000000", None),
        ("qwen3-30b-a3b", "1000000", None),
        ("mixtral-8x7b", "1000000", None),
    ],
)
def test_published_bases(model, base, factor):
    found = flags(model)
    assert found["--rotary-base"] == [base]
    assert found.get("--rope-scaling-factor") == ([factor] if factor else None)
    assert ("--use-rope-scaling" in found) == bool(factor)


def test_every_base_in_the_catalogue_has_a_source():
    for name, row in ROWS.items():
        config = json.loads((CATALOG / "models" / row["family"] / f"{name}.json").read_text(encoding="utf-8"))
        assert bool(rope(config).get("rope_theta")) == bool(row.get("rope_source")), name


def test_most_models_that_megatron_takes_have_theirs():
    taken = [n for n, row in ROWS.items() if row["family"] in FAMILIES and row["family"] != "gpt2"]
    assert sum(bool(ROWS[n].get("rope_source")) for n in taken) >= 0.7 * len(taken)


def test_both_spellings_of_a_config():
    tiny = {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16, "vocab_size": 32000,
        "max_position_embeddings": 8192, "num_key_value_heads": 16,
    }  # fmt: skip
    old = flags({**tiny, "rope_theta": 250000.0, "rope_scaling": {"type": "llama3", "factor": 4.0}})
    new = flags({**tiny, "rope_parameters": {"rope_theta": 250000.0, "rope_type": "llama3", "factor": 4.0}})
    assert old["--rotary-base"] == new["--rotary-base"] == ["250000"]
    assert old["--rope-scaling-factor"] == new["--rope-scaling-factor"] == ["4.0"]
    assert "--rotary-base" not in flags(tiny)
