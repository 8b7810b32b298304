"""What an assistant may ask, one function a tool. Plain arguments in, a plain table out; what is wrong with the input is a `SpecError`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ..errors import SpecError
from .schemas import Model, RunDocument, Strategy

Answer = dict[str, Any]
MAX_PLANS, MAX_FILES, MAX_CHARACTERS = 20, 64, 2_000_000
DAY_S = 86400.0


def plan(
    model: Model,
    on: str,
    seq_len: int | None = None,
    global_batch_size: int | None = None,
    tokens: float | None = None,
    framework: str | None = None,
    objective: str = "time",
    max_cost_usd: float | None = None,
    deadline_days: float | None = None,
    strategy: Strategy | None = None,
    top: int = 3,
) -> Answer:
    """Search every layout of a model on a cluster and rank them.

    model: a catalogue id ("llama-3.1-70b"), a size ("7B"), or the keys of a config.json. on: GPUs ("64xH100", "8xA100-40GB"). seq_len in tokens,
    global_batch_size in sequences, tokens of the whole run. framework: fsdp2, megatron, deepspeed, ddp, fsdp1. objective: time, cost, memory. max_cost_usd
    and deadline_days limit the whole run. strategy: what to hold fixed (tp, pp, dp, cp, ep, sharding, recompute, micro_batch_size, ...). The answer: the top
    plans, best first, with memory, time, throughput, cost and reasons; what each rule removed; what would help where nothing fits.
    """
    from .. import api

    if not 1 <= top <= MAX_PLANS:
        raise SpecError(f"{top} is not between 1 and {MAX_PLANS}", "top")
    document = _document(model, on, framework, strategy, seq_len=seq_len, global_batch_size=global_batch_size, tokens=tokens)
    deadline_s = None if deadline_days is None else deadline_days * DAY_S
    return api.plan(document, top=top, objective=objective, max_cost=max_cost_usd, deadline_s=deadline_s).to_dict()


def estimate(run: RunDocument) -> Answer:
    """Memory by part and phase, step time by part, communication, throughput, cost of one given run.

    run: {"model": ..., "cluster": "64xH100", "training": {"seq_len": 8192, "global_batch_size": 512, ...}, "strategy": {"framework": "fsdp2",
    "sharding": "zero3", "tp": 1, "pp": 1, "micro_batch_size": 1, "recompute": "full", ...}}. Unknown keys are errors that name the nearest one.
    """
    from .. import api

    return api.estimate(_without_files(run)).to_dict()


def memory(
    model: Model,
    on: str,
    seq_len: int | None = None,
    global_batch_size: int | None = None,
    framework: str | None = None,
    strategy: Strategy | None = None,
) -> Answer:
    """What one GPU holds at the worst moment, by part, and whether it fits: allocated, reserved, on the device.

    The arguments are those of plan; what strategy leaves out takes its default.
    """
    from .. import api

    found = api.estimate(_document(model, on, framework, strategy, seq_len=seq_len, global_batch_size=global_batch_size)).to_dict()
    return {k: found[k] for k in ("spec", "fits", "gpus", "parameters", "memory", "warnings", "assumed") if k in found}


def check(files: dict[str, str], launch: str = "", model: Model | None = None, on: str | None = None) -> Answer:
    """Read training configurations and launch scripts and say what is wrong with them, most severe first, with the smallest change that mends it.

    files: name -> text (DeepSpeed JSON, Accelerate YAML, Trainer arguments, Megatron or Slurm scripts, torchtitan, axolotl, LLaMA-Factory, NeMo, ...);
    files that belong together go into one call. launch: the command that starts the run. model, on: what the files do not say. Nothing is executed.
    """
    if len(files) > MAX_FILES or sum(map(len, files.values())) > MAX_CHARACTERS:
        raise SpecError(f"more than {MAX_FILES} files or {MAX_CHARACTERS:,} characters", "files")
    from ..check.run import check as judged

    _no_file(model)
    return judged(files, launch=launch, model=model, on=on).to_dict()


def explain(message: str, run: RunDocument, top: int = 5) -> Answer:
    """Name the tensor that an out-of-memory message is about ("Tried to allocate 9.47 GiB"), by its size in the given run, and what makes it smaller.

    run: as in estimate. top: how many tensors to name.
    """
    from .. import api
    from ..cost.complaint import conclusions, first_complaint, read_complaint
    from ..cost.oom import explain_allocation

    if not 1 <= top <= 50:
        raise SpecError(f"{top} is not between 1 and 50", "top")
    found = api.estimate(_without_files(run))
    message = first_complaint(message)
    complaint = read_complaint(message)
    sized = complaint.request is not None
    suspects = explain_allocation(message, found.model, found.cluster, found.job, found.plan, top) if sized else []
    said = conclusions(complaint, found.memory_dict(), found.cluster.host_memory_bytes)
    return {"conclusions": list(said), "suspects": [asdict(s) for s in suspects]}


TOOLS: tuple[Callable[..., Answer], ...] = (plan, estimate, memory, check, explain)


def _document(model: Model, on: str, framework: str | None, strategy: Mapping[str, Any] | None, **training: Any) -> Answer:
    _no_file(model)
    given = {"framework": framework} if framework else {}
    return {
        "model": model,
        "cluster": on,
        "training": {k: v for k, v in training.items() if v is not None},
        "strategy": {**given, **(strategy or {})},
    }


def _without_files(run: Mapping[str, Any]) -> Answer:
    """The run spec, if it is a table whose model is not in a file."""
    if not isinstance(run, Mapping):
        raise SpecError(f"a run spec is a table with model, cluster, training, strategy; found {type(run).__name__}", "run")
    _no_file(run.get("model"))
    return dict(run)


def _no_file(model: Any) -> None:
    """Raises `SpecError` for a model that only a file of this machine could name: an assistant reads the user's files only where it is given their text."""
    from ..catalog.known_models import model_rows, needs_no_file
    from ..errors import nearest, one_line

    if isinstance(model, str) and not needs_no_file(model):
        looks = "/" in model or "\\" in model or model.startswith((".", "~")) or model.endswith(".json")
        what = "no file is opened here: give the keys of the config.json" if looks else "is not in the catalogue"
        raise SpecError(f"{one_line(model, 60)!r} {what}", "model", nearest(model[:80], model_rows()) or ["llama-3.1-8b", "7B"])
