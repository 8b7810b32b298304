"""The form that a framework's file fills in."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class MemoryRules:
    """What is held where. Sizes in bytes, types as in `spec.precision`."""

    engine: str = "ledger"  # tape: replayed op by op, exact to the byte; ledger: sums of published rules
    parameter_dtype: str = "compute"  # compute: 16-bit copy beside fp32 masters; master: the one sharded copy is fp32 where masters are
    source: str = ""


@dataclass(frozen=True)
class TimeRules:
    """What overlaps with what, and the host's part."""

    source: str = ""


@dataclass(frozen=True)
class Framework:
    """`defaults` are the framework's own values of strategy and training fields that a run spec leaves out."""

    name: str
    title: str
    shardings: tuple[str, ...]  # sharding names it can do
    schedules: tuple[str, ...]  # pipeline schedules it can run
    aliases: tuple[str, ...] = ()
    axes: tuple[str, ...] = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")  # mesh axes it offers
    defaults: dict[str, object] = field(default_factory=dict)
    pad_vocab_multiple: int = 1  # the vocabulary is padded to a multiple of this times tp
    offloads: tuple[str, ...] = ("none",)  # what it can move to host memory or disk
    replicates_kv_heads: bool = False  # tp may be a multiple of the key-value heads: each is then held by several ranks
    pipeline_zero_stage: int = 3  # the highest ZeRO stage that runs together with pipeline stages
    memory: MemoryRules = field(default_factory=MemoryRules)
    time: TimeRules = field(default_factory=TimeRules)
    source: str = ""
