"""Memory and messages of one rank, measured: two steps of PyTorch on fake tensors, the second one counted (optimizer states exist, gradients were dropped).

Without a pipeline it is rank 0, which holds the largest shards; with one every stage runs and the one with the highest peak answers.
"""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.utils import logging

from ..errors import SpecError, TrainwrightError, one_line
from ..measure.verify import Measurement, SentMessage
from ..resolve import Run
from .program import Program, two_steps, world
from .scope import measurable
from .stages import measure_stages
from .tracker import Tracker


def probe(run: Run) -> Measurement:
    """What PyTorch holds and sends in one step of the run; the world has the plan's true size.

    Raises `SpecError` for what cannot be measured (`scope.measurable`) and where PyTorch itself refuses the plan.
    """
    table = measurable(run)
    began = time.perf_counter()
    try:
        with quiet():
            found, _ = measure(table, shorten=True)
    except TrainwrightError:
        raise
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError, KeyError, AttributeError) as error:
        raise SpecError(
            f"PyTorch {torch.__version__} refuses this run: {type(error).__name__}: {one_line(error, 300)}", "strategy"
        ) from error
    return _measurement(found, run.plan.pp > 1, time.perf_counter() - began)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """PyTorch's warnings about its own parts and transformers' about token numbers say nothing about the run."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def measure(table: Mapping[str, Any], trace: bool = False, *, shorten: bool = False, fake: bool = True) -> tuple[dict[str, Any], Tracker]:
    """The numbers of a run as `scope.measurable` writes it (keys as in `report`), and the tracker behind them.

    A pipeline's answer is that of its worst rank; ``ranks`` then holds the peak of each. `shorten`: without a pipeline, the micro-batches between the first
    and the last do the same each; one of them runs and its messages count for all. Without `fake` tensors are real, on the CPU (eager attention, no pipelines).
    """
    strategy = table["strategy"]
    if strategy.get("pp", 1) > 1:
        return measure_stages(table, trace)
    tracker = Tracker(trace)
    size = strategy.get("dp", 1) * strategy.get("tp", 1)
    with world(size), FakeTensorMode() if fake else contextlib.nullcontext(), tracker:
        program = Program(table, tracker)
        program.shorten = shorten
        result = two_steps(program, tracker)
        del program
    gc.collect()
    return result, tracker


def _measurement(found: dict[str, Any], piped: bool, seconds: float) -> Measurement:
    peaks = found["phase_peaks"]
    alive = found["after_backward_bytes"]
    phases = {} if piped else {"forward": peaks["fwd"], "backward": peaks["bwd"], "optimizer": max(peaks.get("opt", 0), alive)}
    return Measurement(
        parameter_bytes=found["parameter_bytes"],
        gradient_bytes=found["gradient_bytes"],
        optimizer_bytes=found["optimizer_bytes"],
        saved_bytes=found.get("saved_bytes"),
        after_forward_bytes=found.get("after_forward_bytes"),
        after_backward_bytes=alive,
        peak_bytes=found["peak_bytes"],
        phases=phases,
        messages=tuple(
            SentMessage(m["group"], m["collective"], m["group_size"], m["dtype"], m["count"], m["payload_bytes"])
            for m in found["communication"]
        ),
        rank=found.get("rank", 0),
        software=f"torch {torch.__version__}, transformers {transformers.__version__}",
        seconds=seconds,
    )
