"""The planner for assistants: plan, estimate, memory, check and explain over the Model Context Protocol, on standard input and output.

    python -m trainwright.mcp            # or: trainwright mcp

Needs the extra ``mcp``. A tool is a function of `TOOLS` with plain arguments; the protocol's description of it is its docstring. What is wrong with the
input is the tool's answer: one line that names the place and the nearest right value, as on the command line. No tool writes, and none runs what it reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from .errors import SpecError, TrainwrightError

Answer = dict[str, Any]
Model = str | dict[str, Any]
MAX_PLANS, MAX_FILES, MAX_CHARACTERS = 20, 64, 2_000_000
DAY_S = 86400.0
INSTRUCTIONS = (
    "Trainwright plans the distributed training of language models: memory to the byte, step time, cost. Call plan where the layout is open, estimate or "
    "memory where it is given, check for configuration files and launch scripts, explain for an out-of-memory message. Bytes are whole numbers, times are "
    "seconds, money is US dollars. Say of each number that it was computed."
)


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
    strategy: dict[str, Any] | None = None,
    top: int = 3,
) -> Answer:
    """Search every layout of a model on a cluster and rank them.

    model: a catalogue id ("llama-3.1-70b"), a size ("7B"), or the keys of a config.json. on: GPUs ("64xH100", "8xA100-40GB"). seq_len in tokens,
    global_batch_size in sequences, tokens of the whole run. framework: fsdp2, megatron, deepspeed, ddp, fsdp1. objective: time, cost, memory. max_cost_usd
    and deadline_days limit the whole run. strategy: what to hold fixed (tp, pp, dp, cp, ep, sharding, recompute, micro_batch_size, ...). The answer: the top
    plans, best first, with memory, time, throughput, cost and reasons; what each rule removed; what would help where nothing fits.
    """
    from . import api

    if not 1 <= top <= MAX_PLANS:
        raise SpecError(f"{top} is not between 1 and {MAX_PLANS}", "top")
    document = _document(model, on, framework, strategy, seq_len=seq_len, global_batch_size=global_batch_size, tokens=tokens)
    deadline_s = None if deadline_days is None else deadline_days * DAY_S
    return api.plan(document, top=top, objective=objective, max_cost=max_cost_usd, deadline_s=deadline_s).to_dict()


def estimate(run: dict[str, Any]) -> Answer:
    """Memory by part and phase, step time by part, communication, throughput, cost of one given run.

    run: {"model": ..., "cluster": "64xH100", "training": {"seq_len": 8192, "global_batch_size": 512, ...}, "strategy": {"framework": "fsdp2",
    "sharding": "zero3", "tp": 1, "pp": 1, "micro_batch_size": 1, "recompute": "full", ...}}. Unknown keys are errors that name the nearest one.
    """
    from . import api

    return api.estimate(run).to_dict()


def memory(
    model: Model,
    on: str,
    seq_len: int | None = None,
    global_batch_size: int | None = None,
    framework: str | None = None,
    strategy: dict[str, Any] | None = None,
) -> Answer:
    """What one GPU holds at the worst moment, by part, and whether it fits: allocated, reserved, on the device.

    The arguments are those of plan; what strategy leaves out takes its default.
    """
    from . import api

    found = api.estimate(_document(model, on, framework, strategy, seq_len=seq_len, global_batch_size=global_batch_size)).to_dict()
    return {k: found[k] for k in ("spec", "fits", "gpus", "parameters", "memory", "warnings", "assumed") if k in found}


def check(files: dict[str, str], launch: str = "", model: Model | None = None, on: str | None = None) -> Answer:
    """Read training configurations and launch scripts and say what is wrong with them, most severe first, with the smallest change that mends it.

    files: name -> text (DeepSpeed JSON, Accelerate YAML, Trainer arguments, Megatron or Slurm scripts, torchtitan, axolotl, LLaMA-Factory, NeMo, ...);
    files that belong together go into one call. launch: the command that starts the run. model, on: what the files do not say. Nothing is executed.
    """
    if len(files) > MAX_FILES or sum(map(len, files.values())) > MAX_CHARACTERS:
        raise SpecError(f"more than {MAX_FILES} files or {MAX_CHARACTERS:,} characters", "files")
    from .check.run import check as judged

    return judged(files, launch=launch, model=model, on=on).to_dict()


def explain(message: str, run: dict[str, Any], top: int = 5) -> Answer:
    """Name the tensor that an out-of-memory message is about ("Tried to allocate 9.47 GiB"), by its size in the given run, and what makes it smaller.

    run: as in estimate. top: how many tensors to name.
    """
    from . import api
    from .cost.oom import explain_allocation
    from .resolve import resolve

    if not 1 <= top <= 50:
        raise SpecError(f"{top} is not between 1 and 50", "top")
    found = resolve(api.load(run))
    return {"suspects": [asdict(s) for s in explain_allocation(message, found.model, found.cluster, found.job, found.plan, top)]}


TOOLS: tuple[Callable[..., Answer], ...] = (plan, estimate, memory, check, explain)


def _document(model: Model, on: str, framework: str | None, strategy: Mapping[str, Any] | None, **training: Any) -> Answer:
    given = {"framework": framework} if framework else {}
    return {
        "model": model,
        "cluster": on,
        "training": {k: v for k, v in training.items() if v is not None},
        "strategy": {**given, **(strategy or {})},
    }


def server() -> Any:
    """The server with every tool of `TOOLS`. Raises `SpecError` without the extra."""
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        raise SpecError("the server needs the mcp package: pip install 'trainwright[mcp]'", "mcp") from None
    from . import __version__

    made = MCPServer("trainwright", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")

    def answering(tool: Callable[..., Answer]) -> Callable[..., Answer]:
        @functools.wraps(tool)
        def call(*args: Any, **kwargs: Any) -> Answer:
            try:
                return tool(*args, **kwargs)
            except TrainwrightError as error:
                raise ToolError(str(error)) from None

        return call

    for tool in TOOLS:
        made.tool(structured_output=True)(answering(tool))
    return made


def main() -> None:
    server().run("stdio")


if __name__ == "__main__":
    main()
