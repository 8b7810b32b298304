"""``train.toml`` of torchtitan before 0.3, whose names were ``[job] [model] [training] [parallelism] ...``."""

from __future__ import annotations

from typing import Any

import tomli_w

from ..errors import SpecError
from ..resolve import Run
from .base import Options
from .rate import torchtitan_rate
from .torchtitan_plan import FLAVORS, sections, stage_layers

QUANTIZE: dict[str, tuple[str, dict[str, Any]]] = {
    "rowwise": ("float8", {"recipe_name": "rowwise", "filter_fqns": ["output"]}),
    "mxfp8": ("mx", {"recipe_name": "mxfp8_cublas", "filter_fqns": ["output"]}),
}


def toml(run: Run, options: Options) -> str:
    """The document; what these releases lack and 0.3 has is refused."""
    _refuse(run, options)
    name, flavor = FLAVORS[run.model.name]
    s = run.plan.structure
    found = sections(run)
    found["training"]["max_norm"] = float(options.clip)
    found["optimizer"] |= {
        "name": "AdamW",
        "lr": float(options.learning_rate),
        "beta1": options.betas[0],
        "beta2": options.betas[1],
        "weight_decay": options.weight_decay,
    }
    found["compile"].pop("enable_async_tensor_parallel", None)
    found["parallelism"]["enable_async_tensor_parallel"] = s.async_tp
    stages = stage_layers(run)
    if stages is not None:
        parts = [[f"layers.{i}" for i in layers] for layers in stages]
        parts[0].insert(0, "tok_embeddings")
        parts[-1] += ["norm", "output"]
        found["parallelism"]["module_fqns_per_model_part"] = parts
    document: dict[str, Any] = {
        "job": {"dump_folder": options.output, "description": options.name},
        "model": {"name": name, "flavor": flavor, "hf_assets_path": "./assets/hf"},
        **found,
        **torchtitan_rate(run, options),
        "checkpoint": {"enable": True, "interval": options.checkpoint_steps},
        "activation_checkpoint": {"mode": s.recompute} | ({"selective_ac_option": "op"} if s.recompute == "selective" else {}),
    }
    if run.job.fp8_recipe in QUANTIZE:
        kind, keys = QUANTIZE[run.job.fp8_recipe]
        document["model"]["converters"] = [f"quantize.linear.{kind}"]
        document["quantize"] = {"linear": {kind: dict(keys)}}
    return tomli_w.dumps(document)


def read_quantize(document: dict[str, Any]) -> dict[str, Any]:
    """The recipe of fp8 products, by what converts them."""
    kinds = document.get("quantize", {}).get("linear", {})
    recipe = next((r for r, (kind, _) in QUANTIZE.items() if kind in kinds), None)
    return {"training.precision": "fp8", "training.fp8_recipe": recipe} if recipe else {}


def _refuse(run: Run, options: Options) -> None:
    title = f"torchtitan {options.torchtitan_version}"
    s = run.plan.structure
    if run.job.loss != "plain":
        raise SpecError(f"{run.job.loss}: {title} computes the loss in one piece", "training.loss", "training.loss = plain")
    if run.plan.tp > 1 and not s.sequence_parallel:
        raise SpecError(
            f"false: {title} has no tensor parallelism without it", "strategy.sequence_parallel", "strategy.sequence_parallel = true"
        )
    if s.cuda_graphs:
        raise SpecError(f"true: {title} captures no graphs", "strategy.cuda_graphs", "strategy.cuda_graphs = false")
