"""In which number formats a rank holds weights, gradients and masters: the one answer that both memory engines, the traffic and the trainer read."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec.job import TrainingJob
from ..spec.plan import Structure
from ..spec.precision import DTYPE_BYTES, activation_bytes, activation_dtype
from .base import Framework


@dataclass(frozen=True)
class Dtypes:
    """Bytes an element. `compute`: activations and products; `stored`: owned parameters, and the gradients and optimizer states that belong to them where
    no `masters` (fp32 copies, which the optimizer then steps) stand beside; `read`: what a module sees of its parameters, and what autograd's gradients come
    in; `reduced`: what is added up and reduced. `autocast`: products make 16-bit copies of fp32 parameters and of the fp32 residual stream."""

    compute: int
    stored: int
    read: int
    reduced: int
    masters: bool
    autocast: bool

    @property
    def mixed(self) -> bool:
        """A wrapper casts its fp32 shards while it gathers them (FSDP's mixed precision)."""
        return self.read != self.stored

    @property
    def stepped(self) -> int:
        """Bytes of the element that the optimizer steps: its states are of that type."""
        return 4 if self.masters else self.stored

    @property
    def stream(self) -> int:
        """Bytes of an element between layers."""
        return 4 if self.autocast else self.compute


def of_one_type(job: TrainingJob) -> bool:
    """Whether gradients are added up in the type of the weights. Sums of bf16 ones in fp32 pass: releases of DeepSpeed differ on them."""
    own = activation_dtype(job.precision)
    return job.gradient_dtype == own or (own, job.gradient_dtype) == ("bf16", "fp32")


def dtypes(framework: Framework, job: TrainingJob, structure: Structure, *, alone: bool) -> Dtypes:
    """The formats of a plan; `alone`: no other rank of data parallelism.

    fp32 masters are one fp32 copy where a wrapper casts (`MemoryRules.parameter_dtype` "master") and around adapters that are loaded in fp32
    (`adapts_fp32`); elsewhere they are copies beside 16-bit parameters. Under autocast parameters are fp32 whatever `master_weights` says.
    """
    rules, compute = framework.memory, activation_bytes(job.precision)
    autocast = job.autocast and compute < 4 and rules.autocasts
    wide = job.master_weights == "fp32" and compute < 4 and not autocast
    wraps = rules.parameter_dtype == "master" and (rules.wraps_alone or structure.sharding != "none" or not alone)
    one_copy = wide and (wraps or (rules.adapts_fp32 and job.method != "full"))
    stored = 4 if autocast or one_copy else compute
    read = compute if one_copy and wraps else stored
    free = (one_copy and wraps) or rules.reduces == "any" or (rules.reduces, job.gradient_dtype) == ("fp32", "fp32")
    reduced = int(DTYPE_BYTES[job.gradient_dtype]) if free else read
    return Dtypes(compute, stored, read, reduced, masters=wide and not one_copy, autocast=autocast)
