"""DeepSpeed: ZeRO 0 to 3 and optimizers beside the host's memory, run from the plan's own emitted ``ds_config.json``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...emit import Options, emit
from ...emit.base import Limit, only, when
from ...emit.common import no_axis
from ...emit.deepspeed import CONFIG, TARGET
from ...emit.nearest import refuse
from ...errors import SpecError, TrainwrightError, one_line
from ...resolve import Run
from ..settings import Settings
from .base import Engine

if TYPE_CHECKING:
    from ..mesh import Ranks
    from ..step import Trainer

EXTRA = "pip install torch 'trainwright[deepspeed]'"
OPS = "TRAINWRIGHT_DEEPSPEED_OPS"  # name=file of every compiled extension, for the ranks
COMPILE_S = 1800.0  # longest: a minute or two of a free core

# What files can say and this engine does not run.
MORE: tuple[Limit, ...] = (
    *no_axis("tp", "pp", "cp", "ep", why="runs here with data parallelism alone"),
    only("training.precision", ["bf16", "fp32"], "runs here without a loss scale"),
    only("training.optimizer", ["adamw"], "steps here with AdamW"),
    only("strategy.offload", ["none", "optimizer-cpu"], "moves only the optimizer, to the host's memory, here"),
    only("training.method", ["full"], "trains all weights here"),
    only("training.loss", ["plain"], "computes the whole loss at once here"),
    only("training.dropout", [0.0], "drops nothing out here"),
    only("strategy.compile", [False], "runs modules as they are here"),
    Limit(
        "strategy.sharding",
        lambda run: run.plan.structure.sharding != "none" or run.job.precision == "fp32",
        "keeps no fp32 masters without sharding",
        lambda run: {"strategy.sharding": "zero1"},
    ),
    when(
        lambda run: run.plan.structure.offload != "none",
        only("strategy.sharding", ["zero2", "zero1", "zero3"], "offloads the optimizer of a sharded run"),
    ),
)
RUNS = replace(TARGET, limits=(*TARGET.limits, *MORE))


def check(run: Run, settings: Settings, on_gpu: bool) -> None:
    refuse(run, RUNS)
    if settings.model_from:
        raise SpecError("a module of one's own runs under PyTorch's engine alone", "--model-from", "--engine native")
    if settings.compile not in ("auto", "off"):
        raise SpecError("DeepSpeed runs modules as they are here", "--compile", "--compile off")
    if util.find_spec("deepspeed") is None:
        raise TrainwrightError(f"DeepSpeed is not installed: {EXTRA} (torch first), or --engine native with strategy.framework=fsdp2")


def options(settings: Settings) -> Options:
    """What the run's settings say and the emitted files hold."""
    return Options(
        learning_rate=settings.learning_rate,
        clip=settings.clip,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def files(run: Run, settings: Settings) -> Mapping[str, str]:
    """The plan's ``ds_config.json``, as `trainwright emit --to deepspeed` writes it."""
    return {CONFIG: emit(run, "deepspeed", options(settings))[CONFIG]}


def config_of(run: Run, settings: Settings, folder: Path | None) -> dict[str, Any]:
    """What DeepSpeed is given: the file in the run's folder, or the text that it would have. Raises `SpecError` where the file is damaged."""
    if folder is None:
        found = json.loads(files(run, settings)[CONFIG])
    else:
        try:
            found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SpecError(f"cannot be read: {error}", str(folder / CONFIG)) from None
    if not isinstance(found, dict):
        raise SpecError("is no table", str(folder and folder / CONFIG))
    return found


def extensions(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What DeepSpeed compiles for such a configuration, by the names of its builders."""
    if config["optimizer"]["params"].get("torch_adam"):
        return ()
    offloads = config["zero_optimization"].get("offload_optimizer", {}).get("device", "none") != "none"
    return ("CPUAdamBuilder" if offloads else "FusedAdamBuilder",)


def prepare(run: Run, settings: Settings, tell: Callable[[str], None]) -> Mapping[str, str]:
    """Compiles what is not compiled yet, in one process: ranks that compile together wait for each other, and one that is killed leaves a lock that the
    next ones wait for without end. Raises `TrainwrightError` where the compiler fails."""
    wanted = extensions(config_of(run, settings, None))
    if not wanted:
        return {}
    tell("DeepSpeed's Adam is compiled by its first run, in some minutes (training.optimizer_kernel=foreach takes PyTorch's)")
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    if settings.device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    command = [sys.executable, "-m", "trainwright.train.extensions", *wanted]
    child = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=COMPILE_S)
    except subprocess.TimeoutExpired:
        raise TrainwrightError(f"DeepSpeed's {', '.join(wanted)} did not compile in {COMPILE_S:.0f} s") from None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if child.returncode:
        last = [line for line in err.splitlines() if line.strip()][-1:] or ["it said nothing"]
        near = "training.optimizer_kernel=foreach takes PyTorch's AdamW instead"
        raise TrainwrightError(f"DeepSpeed's Adam cannot be compiled here: {one_line(last[0], 300)}; {near}")
    return {OPS: out.strip().splitlines()[-1]}


def trainer(run: Run, settings: Settings, ranks: Ranks, folder: Path | None) -> Trainer:
    from ..deepspeed import DeepSpeedTrainer

    return DeepSpeedTrainer(run, settings, ranks, config_of(run, settings, folder))


ENGINE = Engine(
    name="deepspeed",
    title="DeepSpeed",
    check=check,
    trainer=trainer,
    files=files,
    prepare=prepare,
    frameworks=("deepspeed",),
    aliases=("ds",),
)
