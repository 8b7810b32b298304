"""What one rank of a layout sends in a step, counted in this very process: the real trainer on a process group that carries nothing.

Sums are wrong there and nobody reads them. DDP's own reduction, which waits for data in C++, is asked of Python instead; an all-to-all answers what was asked,
so that experts get as many tokens as they were sent.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deep import packed, scheduled
from layouts import batch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwright.cost.estimate import evaluate
from trainwright.cost.table import PlanTable
from trainwright.measure.real import message_rows
from trainwright.resolve import Run
from trainwright.train.caches import forget_world
from trainwright.train.device import Machine
from trainwright.train.dry import hook_without_data
from trainwright.train.measure_runs import sent
from trainwright.train.mesh import ranks_of
from trainwright.train.settings import Settings
from trainwright.train.step import Trainer


@contextlib.contextmanager
def world(size: int, rank: int) -> Iterator[None]:
    exchange = dist.all_to_all_single

    def answered(out: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = exchange(out, given, *args, **kwargs)
        out.copy_(given)
        return work

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with mock.patch.object(dist, "all_to_all_single", answered):
            yield
    finally:
        gc.collect()
        dist.destroy_process_group()
        forget_world()


def sent_by(run: Run, rank: int, documents: bool) -> list[list[Any]]:
    """What `measure_runs.sent` says of the first rank of stage `rank`."""
    gpus = run.plan.gpus
    with world(gpus, rank * (gpus // run.plan.pp)):
        trainer = Trainer(run, Settings(steps=3, warmup_steps=0), ranks_of(run.plan, Machine("cpu", "fake")))
        wrapped = [call for call in trainer.calls if isinstance(call, nn.parallel.DistributedDataParallel)]
        for call in wrapped:
            hook_without_data(call, partial(dist.all_reduce, group=call.process_group), rebuilds=True)
        made = (packed if documents else batch)(0, *trainer.ranks.replica)
        # A static DDP tells its ranks in its first step which weights are used, and of its new buckets in its third.
        for _ in range(3 if wrapped else 0):
            trainer.step(made)
        return sent(trainer, made)


def differences(model: str, strategy: dict[str, Any], training: dict[str, Any] | None = None, documents: bool = False) -> list[str]:
    """Rows of ``verify --exact`` in which plan and run differ, on any rank of the pipeline; raises where nothing was sent at all."""
    run = scheduled(model, {"micro_batch_size": 2, **strategy}, {**(training or {}), "packing": documents})
    estimate = evaluate(run.model, run.cluster, run.job, PlanTable.from_plans([run.plan])).row(0, {})
    rows = message_rows(estimate, [sent_by(run, rank, documents) for rank in range(run.plan.pp)])
    assert rows, "nothing was sent"
    return [f"{row.what}: {row.predicted} planned, {row.measured} sent" for row in rows if not row.within]
