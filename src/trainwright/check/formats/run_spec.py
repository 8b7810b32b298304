"""Our own run specs and plans, and a model's ``config.json``: what stands beside files of an engine, or in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...spec.run import StrategySection, TrainingSection, parse_cluster
from ..document import Document
from ..setup import Reading
from . import Format
from ._facts import Facts, model, number, text, whole

SECTIONS: Mapping[str, Any] = {"training": TrainingSection, "strategy": StrategySection}


def recognizes(document: Document) -> float:
    data = document.data
    if document.syntax not in ("toml", "json", "yaml") or not isinstance(data, Mapping):
        return 0.0
    strategy, training = data.get("strategy"), data.get("training")
    own = isinstance(strategy, Mapping) and bool({"framework", "sharding", "micro_batch_size", "dp", "tp", "pp"} & strategy.keys())
    run = "model" in data and isinstance(data.get("cluster"), (str, Mapping))
    return (
        0.99 if (own and (isinstance(training, Mapping) or run)) or (run and (strategy is None or isinstance(strategy, Mapping))) else 0.0
    )


def read(document: Document, context: Mapping[str, Any]) -> Reading:
    facts = Facts(document)
    unknown = []
    for section, form in SECTIONS.items():
        table = document.data.get(section)
        for key, value in table.items() if isinstance(table, Mapping) else ():
            if key in form.model_fields:
                facts.say(f"{section}.{key}", value, (section, key))
            else:
                unknown.append((section, key))
    cluster = document.data.get("cluster")
    _cluster(facts, cluster)
    facts.take("model.name", text, "model")
    facts.take("training.steps", whole, "steps")
    facts.take("training.learning_rate", number, "learning_rate")
    facts.take("training.clip", number, "clip")
    return facts.reading("run_spec", unknown=tuple(unknown), fragment="model" not in document.data)


def _cluster(facts: Facts, cluster: Any) -> None:
    if isinstance(cluster, str):
        try:
            cluster = parse_cluster(cluster)
        except ValueError:
            return
        for name, field in (("gpu", "cluster.gpu"), ("nodes", "launch.nodes"), ("gpus_per_node", "launch.gpus_per_node")):
            facts.say(field, cluster.get(name), ("cluster",))
        return
    facts.take("cluster.gpu", text, ("cluster", "gpu"))
    facts.take("launch.nodes", whole, ("cluster", "nodes"))
    facts.take("launch.gpus_per_node", whole, ("cluster", "gpus_per_node"))


def recognizes_model(document: Document) -> float:
    data = document.data
    if document.syntax != "json" or not isinstance(data, Mapping) or "model_type" not in data:
        return 0.0
    return 0.95 if {"hidden_size", "n_embd", "d_model", "architectures", "num_hidden_layers", "text_config"} & data.keys() else 0.0


def read_model(document: Document, context: Mapping[str, Any]) -> Reading:
    facts = Facts(document)
    model(facts)
    facts.take("model.model_type", text, "model_type")
    facts.take("model.name", text, "_name_or_path")
    return facts.reading("hf_config", fragment=True)


FORMAT = (
    Format("run_spec", "Trainwright run spec or plan", recognizes, read, ("trainwright",), ""),
    Format("hf_config", "Hugging Face config.json", recognizes_model, read_model, ("config.json",), "transformers configuration_utils.py"),
)
