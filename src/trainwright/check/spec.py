"""What a setup describes, as a run spec: so that the planner's estimate judges its memory and time, and a converter can write it for another engine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..errors import TrainwrightError
from ..spec.run import StrategySection, TrainingSection, parse_cluster, split_nodes
from .formats._facts import whole
from .setup import Setup

AXES = ("tp", "pp", "cp")
# Degrees and batch follow below; a number of tokens follows from steps.
APART = frozenset(
    (
        "training.global_batch_size",
        "training.tokens",
        "strategy.dp",
        "strategy.micro_batch_size",
        "strategy.dp_shard",
        "strategy.dp_replicate",
    )
)
USUAL_LENGTH = 2048


@dataclass(frozen=True)
class Described:
    """`document`: a run spec for `trainwright.load`; `assumed`: what no file says, one short phrase each."""

    document: dict[str, Any]
    assumed: tuple[str, ...] = ()


def to_spec(setup: Setup, usual_gpu: str = "H100-SXM-80GB") -> Described | None:
    """The run spec of a setup; None where no model is known, or where its degrees and its processes contradict each other (K03 says so)."""
    assumed: list[str] = []
    model = model_of(setup)
    if model is None:
        return None
    degrees = {axis: whole(setup.value(f"strategy.{axis}")) or 1 for axis in AXES}
    cluster = _cluster(setup, degrees, usual_gpu, assumed)
    if cluster is None:
        return None
    total = cluster["nodes"] * cluster["gpus_per_node"]
    rest = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if total % rest:
        return None
    training, strategy = _fields(setup, "training", TrainingSection), _fields(setup, "strategy", StrategySection)
    if "seq_len" not in training:
        training["seq_len"] = whole(setup.value("model.max_position_embeddings")) or USUAL_LENGTH
        assumed.append(f"{training['seq_len']:,} tokens a sequence")
    _split(setup, strategy, total // rest)
    _batch(setup, training, strategy, total // rest, assumed)
    steps = whole(setup.value("training.steps"))
    if steps:
        training["tokens"] = float(steps * training["global_batch_size"] * training["seq_len"])
    if training.get("method") == "qlora":
        training.setdefault("base_quantization", "nf4")
    return Described({"model": model, "cluster": cluster, "training": training, "strategy": strategy}, tuple(assumed))


def _fields(setup: Setup, section: str, form: Any) -> dict[str, Any]:
    """Fields of one section that any file states and that the run spec takes by themselves."""
    found: dict[str, Any] = {}
    for name in form.model_fields:
        value = setup.value(f"{section}.{name}")
        if value is None or f"{section}.{name}" in APART:
            continue
        try:
            form.model_validate({name: value})
        except ValueError:
            continue  # what a file calls so is no value of ours: its own check speaks of it
        found[name] = value
    return found


def _split(setup: Setup, strategy: dict[str, Any], ranks: int) -> None:
    """Replicas and shards, where they are said and multiply to the data-parallel ranks (-1 is what is left)."""
    replicate = whole(setup.value("strategy.dp_replicate"))
    if replicate and ranks % replicate == 0 and strategy.get("sharding") not in (None, "none"):
        strategy["dp_replicate"] = replicate
    if strategy.get("virtual_stages", 1) > 1:
        strategy.setdefault("schedule", "interleaved-1f1b")
    elif strategy.get("schedule") == "interleaved-1f1b":
        strategy.pop("schedule")


def _batch(setup: Setup, training: dict[str, Any], strategy: dict[str, Any], ranks: int, assumed: list[str]) -> None:
    """micro x accumulation x ranks. Where a file's total is no such product, the nearest is taken: K02 speaks of the difference."""
    micro = whole(setup.value("strategy.micro_batch_size"))
    total = whole(setup.value("training.global_batch_size"))
    steps = whole(setup.value("training.accumulation"))
    if micro is None and total and steps and total % (steps * ranks) == 0:
        micro = total // (steps * ranks)
    strategy["micro_batch_size"] = micro or 1
    if micro is None:
        assumed.append("one sequence a micro-batch")
    one = strategy["micro_batch_size"] * ranks
    if total is None:
        total = one * (steps or 1)
    elif total % one:
        total = max(1, round(total / one)) * one
        assumed.append(f"a global batch of {total}")
    training["global_batch_size"] = total


def _cluster(setup: Setup, degrees: Mapping[str, int], usual: str, assumed: list[str]) -> dict[str, Any] | None:
    asked = setup.asked.get("on")
    table: dict[str, Any] = {}
    if isinstance(asked, str):
        table = parse_cluster(asked) if re.match(r"\s*\d+\s*[x×]", asked) else {"gpu": asked}
    elif isinstance(asked, Mapping):
        table = dict(asked)
    gpu = table.get("gpu") or gpu_of(setup)
    if gpu is None:
        gpu = usual
        assumed.append(usual)
    if whole(table.get("nodes")) and whole(table.get("gpus_per_node")):
        return {**table, "gpu": gpu}
    nodes, per_node = whole(setup.value("launch.nodes")), whole(setup.value("launch.gpus_per_node"))
    total = whole(setup.value("launch.world_size")) or (per_node * (nodes or 1) if per_node else None)
    if total is None:
        need = degrees["tp"] * degrees["pp"] * degrees["cp"] * (whole(setup.value("strategy.dp")) or 1)
        total = -(-max(8, need, (whole(setup.value("strategy.ep")) or 1) * degrees["pp"]) // need) * need
        assumed.append(f"{total} GPUs")
    if per_node is None or total % per_node:
        return {**table, "gpu": gpu, **split_nodes(total)}
    return {**table, "gpu": gpu, "nodes": total // per_node, "gpus_per_node": per_node}


def gpu_of(setup: Setup) -> str | None:
    """The GPU that a file names (SkyPilot's accelerators, a scheduler's constraint), or its own path does (``examples/h100/...``), as a catalogue id."""
    for field in ("cluster.gpu", "cluster.constraint"):
        word = setup.value(field)
        if isinstance(word, str):
            found = _gpu_in((word, *re.split(r"[|&,\[\]]", word)))
            if found is not None:
                return found
    parts = re.split(r"[/_.\s-]+", setup.readings[0].document.name) if setup.readings else []
    pairs = [f"{a}-{b}" for a, b in pairwise(parts)]
    return _gpu_in(word for word in (*pairs, *parts) if re.match(r"[A-Za-z]+\d", word))


def _gpu_in(words: Iterable[str]) -> str | None:
    from ..catalog.load import load_gpu

    for word in words:
        try:
            return str(load_gpu(word.strip()).id)
        except TrainwrightError:
            continue
    return None


def model_of(setup: Setup) -> Any:
    """As asked; a model of the catalogue by the name in a file; a config.json of the sizes that the files state."""
    asked = setup.asked.get("model")
    if asked is not None:
        return asked
    name = setup.value("model.name")
    return catalogued(str(name)) if name and catalogued(str(name)) else shape(setup)


def catalogued(name: str) -> str | None:
    """The catalogue's id of ``meta-llama/Llama-3.1-8B-Instruct``, of a path that ends in such a name, or None."""
    from ..catalog.load import load_model, needs_no_file

    base = name.rstrip("/").rpartition("/")[2]
    plain = re.sub(r"[-_](?:instruct|chat|base|hf|it|bnb-4bit|4bit|gptq.*|awq|sft|v\d+(?:\.\d+)?)$", "", base, flags=re.IGNORECASE)
    for word in dict.fromkeys((name, base, plain)):
        # A size alone is no name, and no file is opened because another names it.
        if word and not re.fullmatch(r"[\d.]+[bBmMtT]?", word) and needs_no_file(word):
            return str(load_model(word).name)
    return None


SAME_NAME = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "max_position_embeddings", "head_dim",
)  # fmt: skip


def shape(setup: Setup) -> dict[str, Any] | None:
    """A config.json of the stated sizes: gated and rotary like Llama (Mixtral with experts), or GPT-2's."""
    size = {name: whole(setup.value(f"model.{name}")) for name in SAME_NAME}
    width, layers, heads = size["hidden_size"], size["num_hidden_layers"], size["num_attention_heads"]
    if not width or not layers or not heads or (width % heads and not size["head_dim"]):
        return None
    experts = whole(setup.value("model.num_experts"))
    length = size["max_position_embeddings"] or whole(setup.value("training.seq_len")) or USUAL_LENGTH
    gated = setup.value("model.hidden_act") == "silu" or bool(size["num_key_value_heads"]) or bool(experts)
    if not gated:
        return {
            "model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": size["vocab_size"] or 50257, "n_positions": length,
            "n_inner": size["intermediate_size"] or 4 * width,
        }  # fmt: skip
    found = {k: v for k, v in size.items() if v is not None} | {
        "model_type": "mixtral" if experts else "llama",
        "num_key_value_heads": size["num_key_value_heads"] or heads,
        "intermediate_size": size["intermediate_size"] or int(8 * width / 3),
        "vocab_size": size["vocab_size"] or 32000,
        "max_position_embeddings": length,
    }
    if experts:
        found |= {"num_local_experts": experts, "num_experts_per_tok": whole(setup.value("model.num_experts_per_tok")) or 2}
    return found
