"""GPUs, links and clusters. Bandwidths are bytes per second, per GPU and per direction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CollectiveCurve:
    """Seconds of a collective among `ranks` devices of one node, measured at rising whole-message sizes."""

    kind: str
    ranks: int
    bytes: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Measured:
    """What `trainwright calibrate` measured of a device, all devices of the node at work. `kernels` has the tables of ``kernels.toml`` with measured
    numbers in them (``matmul``, ``attention``, ``passes`` and ``loss`` by number format)."""

    kernels: Mapping[str, Any] = field(default_factory=dict)
    collectives: tuple[CollectiveCurve, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class GpuSpec:
    """One device as a plan sees it (one die of a dual-die card where the system shows two devices).

    `peak_flops` are dense FLOP/s by number format; `capacity_bytes` is what nvidia-smi (or its like) shows in total.
    `link_bytes_per_s` is the scale-up link (NVLink, xGMI, ...), summed over its lanes, one way; 0 = none, then `pcie_bytes_per_s` carries.
    """

    id: str
    aliases: tuple[str, ...]
    vendor: str
    form: str
    arch: str
    compute_units: int
    peak_flops: Mapping[str, float]
    memory_label_gb: float
    capacity_bytes: int
    memory_type: str
    hbm_bytes_per_s: float
    link: str
    link_bytes_per_s: float
    scaleup_gpus: int
    gpus_per_node: int
    nic_default_gbps: float
    pcie_bytes_per_s: float
    tdp_w: float
    link_pair_bytes_per_s: float | None = None  # what one pair gets, where that is less than the sum
    host_memory_bytes: float | None = None  # of a typical node
    nvme_bytes: float | None = None
    notes: str = ""
    source: str = ""
    confidence: str = ""
    measured: Measured | None = None  # this very machine, in place of the laws' constants

    @property
    def is_cpu(self) -> bool:
        """A share of a host's cores: gloo moves its messages, and the host that launches kernels is the device that runs them."""
        return self.arch == "cpu"

    def peak(self, precision: str) -> float:
        """Dense FLOP/s in that format; the next wider format where the device has none (fp8 on Ampere runs as bf16)."""
        order = {
            "fp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
            "fp8": ("fp8", "bf16", "fp16", "fp32"),
            "bf16": ("bf16", "fp32"),
            "fp16": ("fp16", "bf16", "fp32"),
        }
        for name in order.get(precision, (precision, "fp32")):
            if self.peak_flops.get(name):
                return self.peak_flops[name]
        return max(self.peak_flops.values())


@dataclass(frozen=True)
class ClusterSpec:
    """`nodes` times `gpus_per_node` of one GPU. `scaleup_gpus` are joined by the fast link (a node, or a rack of NVL72)."""

    gpu: GpuSpec
    nodes: int
    gpus_per_node: int
    scaleup_gpus: int
    network_bytes_per_s: float  # per GPU, one way
    memory_margin: float = 0.04
    network_latency_s: float | None = None  # one way, from host to host; None = that of the kind of network
    host_memory_bytes: float | None = None  # of one node
    nvme_bytes: float | None = None
    usd_per_gpu_hour: float | None = None
    price_source: str = ""
    assumed: tuple[str, ...] = field(default_factory=tuple)  # what was not said and taken from the catalogue

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node
