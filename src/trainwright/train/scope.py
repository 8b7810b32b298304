"""Which runs PyTorch itself can be asked about, and such a run as the plain table that a `Program` is made from. Needs no torch.

The measurement runs the real wrappers of PyTorch; what is not PyTorch's own code (Megatron, DeepSpeed, bitsandbytes), what has no fake kernel and what the
modules here do not build is refused, with the field and what can be measured instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import util
from typing import Any

from ..errors import SpecError, TrainwrightError
from ..resolve import Run
from ..schedules import SCHEDULES
from ..spec.model import ModelSpec

EXTRA = "pip install 'trainwright[train]'"
SPLIT_TYPES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")  # with tensor parallelism, pipelines and adapters too
MODEL_TYPES = (*SPLIT_TYPES, "gemma", "granite", "olmo", "olmo2", "olmo3", "phi", "phi3", "smollm3", "stablelm", "starcoder2", "nemotron")
OPTIMIZERS = ("adamw", "sgd", "sgd_momentum")
GPT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")


class TorchMissing(TrainwrightError):
    """torch or transformers is not installed; ``str()`` says how to install them."""

    def __init__(self) -> None:
        super().__init__(f"this needs PyTorch and transformers: {EXTRA}")


def require_torch() -> None:
    """Raises `TorchMissing` where the extra ``train`` is not installed; imports nothing."""
    if util.find_spec("torch") is None or util.find_spec("transformers") is None:
        raise TorchMissing


def measurable(run: Run) -> dict[str, Any]:
    """{"model": config, "training": ..., "strategy": ...}, every field filled, for a `Program`.

    Raises `SpecError` that names the first field which cannot be measured and its measurable values.
    """
    model = _model(run.model)
    filled = run.filled
    training, strategy = filled["training"], filled["strategy"]
    for where, what, allowed in (*_training(run), *_strategy(run)):
        if not _holds(what, allowed):
            raise SpecError(f"{what!r} cannot be measured: what runs here is PyTorch's own code on fake tensors", where, allowed)
    if training["method"] == "lora":
        _adapters(run.model, training["lora_targets"])
    _types(run)
    _schedule(run)
    _split(run)
    _tensor(run)
    return {"model": model, "training": training, "strategy": strategy}


def _holds(what: Any, allowed: Iterable[Any]) -> bool:
    return any(type(what) is type(a) and what == a for a in allowed)


Fields = Iterable[tuple[str, Any, tuple[Any, ...]]]


def _training(run: Run) -> Fields:
    t = run.job
    piped = run.plan.pp > 1
    return (
        ("training.precision", t.precision, ("bf16", "fp16", "fp32")),
        ("training.optimizer", t.optimizer, OPTIMIZERS),
        ("training.method", t.method, ("full",) if piped else ("full", "lora")),
        ("training.loss", t.loss, ("plain",) if piped else ("plain", "chunked", "vocab-parallel")),
        ("training.dropout", t.dropout, (0.0,)),
        ("training.packing", t.packing, (False,)),
        ("training.optimizer_in_backward", t.optimizer_in_backward, (False,) if piped else (False, True)),
    )


def _strategy(run: Run) -> Fields:
    plan, s = run.plan, run.plan.structure
    return (
        ("strategy.framework", s.framework, ("fsdp2", "ddp")),
        ("strategy.sharding", s.sharding, ("none", "zero1") if s.framework == "ddp" else ("none", "zero2", "zero3")),
        ("strategy.cp", plan.cp, (1,)),
        ("strategy.ep", plan.ep, (1,)),
        ("strategy.etp", plan.etp, (1,)),
        ("strategy.schedule", s.schedule, _schedules() if plan.pp > 1 else (s.schedule,)),
        ("strategy.offload", s.offload, ("none",)),
        ("strategy.compile", s.compile, (False,)),
        ("strategy.fp8_params", s.fp8_params, (False,)),
        ("strategy.cuda_graphs", s.cuda_graphs, (False,)),
        ("strategy.async_tp", s.async_tp, (False,)),
        ("strategy.recompute_modules", list(s.recompute_modules), ([], ["core_attn"])),
        ("strategy.options", {k: v for k, v in s.options if k != "no_sync"}, ({},)),
        ("strategy.options.no_sync", dict(s.options).get("no_sync", True), (True, False)),
    )


def _schedules() -> tuple[str, ...]:
    """Those that torch.distributed.pipelining has."""
    return tuple(entry.name for entry in SCHEDULES.values() if entry.torch_class)


def _types(run: Run) -> None:
    """fp32 masters beside 16-bit parameters are a matter of FSDP2's mixed precision; DDP and one rank alone have autocast for it."""
    t, wrapped = run.job, run.plan.structure.framework == "fsdp2" and (run.plan.structure.sharding != "none" or run.plan.dp > 1)
    if t.precision == "fp32" or t.autocast or t.master_weights == "none" or wrapped:
        return
    raise SpecError(
        "fp32 masters without FSDP2 cannot be measured: PyTorch keeps none beside 16-bit parameters (say training.autocast = true, or none)",
        "training.master_weights",
        ["none"],
    )


def _schedule(run: Run) -> None:
    """torch.distributed.pipelining makes a split backward's weight gradients itself: for the parameters that a stage shows at that moment, past their hooks."""
    s, entry = run.plan.structure, SCHEDULES[run.plan.structure.schedule]
    if run.plan.pp == 1 or not entry.splits_backward:
        return
    if s.framework == "ddp":
        raise SpecError(
            f"{s.schedule} cannot be measured: PyTorch's DDP does not reduce the gradients of a backward that is split",
            "strategy.framework",
            ["fsdp2"],
        )
    if s.sharding == "zero3":
        raise SpecError(
            f"{s.schedule} cannot be measured: PyTorch loses the gradients of weights that are sharded again between forward and the split backward",
            "strategy.sharding",
            ["zero2"],
        )


def _split(run: Run) -> None:
    """Plans for tensor parallelism, stages and adapters know the modules of some families."""
    kind, plan = run.model.model_type, run.plan
    if kind not in SPLIT_TYPES and (plan.tp > 1 or plan.pp > 1 or run.job.method != "full"):
        what = "tensor parallelism" if plan.tp > 1 else "a pipeline" if plan.pp > 1 else "an adapter"
        raise SpecError(f"the family {kind} cannot be measured with {what}", "model", SPLIT_TYPES)


def _tensor(run: Run) -> None:
    plan, job = run.plan, run.job
    if plan.tp == 1:
        return
    if plan.pp > 1:
        raise SpecError("tensor parallelism inside a pipeline cannot be measured", "strategy.tp", [1])
    if job.method == "lora":
        raise SpecError("adapters under tensor parallelism cannot be measured", "training.method", ["full"])
    sharded = plan.structure.sharding != "none" or plan.dp > 1
    whole_norms = not plan.structure.sequence_parallel or run.model.model_type == "qwen3"
    if not sharded and whole_norms and job.optimizer_kernel != "for-loop":
        raise SpecError(
            f"PyTorch's {job.optimizer_kernel} optimizer refuses norms that are whole beside tensors that are split",
            "training.optimizer_kernel",
            ["for-loop"],
        )


def _adapters(model: ModelSpec, targets: Iterable[str]) -> None:
    known = GPT_TARGETS if model.model_type == "gpt2" else (*GPT_TARGETS, "gate_proj")
    for target in targets:
        if target not in known:
            raise SpecError(f"{target[:40]!r} is no projection that adapters can be put on here", "training.lora_targets", known)


def _model(model: ModelSpec) -> dict[str, Any]:
    """The keys of a ``config.json`` that build the modules."""
    if model.experts:
        raise SpecError(f"{model.name} is a mixture of experts, which cannot be measured", "model", MODEL_TYPES)
    if model.model_type not in MODEL_TYPES:
        raise SpecError(f"the family {model.model_type} cannot be measured", "model", MODEL_TYPES)
    config = dict(model.config)
    if model.model_type != "gpt2":
        return {**config, "model_type": model.model_type, "tie_word_embeddings": model.tied}
    return {
        "model_type": "gpt2",
        "n_layer": model.num_layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": config.get("n_inner") or config.get("intermediate_size") or 4 * model.hidden,
        "n_positions": model.max_positions,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
    }
