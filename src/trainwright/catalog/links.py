"""What links deliver of their nominal rate, from ``links.toml``: one row a kind of link, with the physical meaning and the source of each
constant."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from ..spec.cluster import ClusterSpec, GpuSpec

PCIE4_BYTES_PER_S = 30e9  # sixteen lanes, one way


@dataclass(frozen=True)
class ScaleUpLink:
    """A link between the GPUs of one node or rack.

    Shares are of the nominal one-way rate of a GPU: `ring` what every hop of a ring moves, `in_network` the traffic of a GPU while the
    switch reduces (NVLS; 0 = the switch cannot), `pair` one send and receive, `exchange` an all-to-all. A collective starts after `start_s`
    and takes `hop_s` a step (`in_network`: a start and a hop for each GPU, which owns one piece of the message). Its transfer takes
    bytes / rate x (1 + (half_bytes / bytes)^power), so at `half_bytes` half of the rate is reached. `network_channels`: NICs that the
    collectives of one domain use at most, 0 = those of all members; set where the domain is a rack of several hosts.
    """

    id: str
    words: tuple[str, ...]
    ring: float
    in_network: float
    pair: float
    exchange: float
    start_s: float
    hop_s: float
    half_bytes: float
    power: float
    in_network_start_s: float
    in_network_hop_s: float
    in_network_half_bytes: float
    in_network_power: float
    network_channels: int
    source: str


@dataclass(frozen=True)
class ScaleOutLink:
    """The network between nodes or racks.

    Shares are of the rate of the NICs: what a `ring`, a `tree`, a tree of switch-reduced nodes (`in_network_tree`) or an all-to-all
    (`exchange`) moves of a long message. `hop_s` is one message through proxy, NIC and switch. Short messages go by a low-latency protocol
    that moves `small_bytes_per_s` a NIC (at most a quarter of its rate: every word carries a flag, and nothing is pipelined); long ones
    fill a pipeline first, `fill_s` for every doubling of the number of nodes.
    """

    id: str
    ring: float
    tree: float
    in_network_tree: float
    exchange: float
    hop_s: float
    small_bytes_per_s: float
    fill_s: float
    source: str


def scaleup_link(gpu: GpuSpec) -> ScaleUpLink:
    """The row of the GPU's link; a kind without a row of its own takes that of its generation's nearest relative, the last row in the
    end."""
    rows = _scaleup()
    if not gpu.link_bytes_per_s:
        return pcie_link()
    name = gpu.link.lower()
    for row in rows:
        if any(word.lower() in name for word in row.words):
            return row
    return rows[-1]


def pcie_link() -> ScaleUpLink:
    """What joins the GPUs of a node beyond their link, or where they have none."""
    return next(row for row in _scaleup() if row.id == "pcie")


def scaleout_link(cluster: ClusterSpec) -> ScaleOutLink:
    """The kind of network: ``cloud-ethernet`` where a GPU has clearly less network than the reference design of its node (nothing else in a
    cluster tells them apart), ``rdma-pcie3`` where the host's bus is of the third generation, else ``rdma``; ``tcp`` between CPUs. A latency that the
    cluster states takes the place of a hop's; TCP's own work comes on top."""
    reference = cluster.gpu.nic_default_gbps * 1e9 / 8
    kind = "rdma"
    if cluster.network_bytes_per_s < 0.75 * reference:
        kind = "cloud-ethernet"
    elif 0 < cluster.gpu.pcie_bytes_per_s < PCIE4_BYTES_PER_S:
        kind = "rdma-pcie3"
    if cluster.gpu.is_cpu:
        kind = "tcp"
    row = next(row for row in _scaleout() if row.id == kind)
    if cluster.network_latency_s is None:
        return row
    return replace(row, hop_s=cluster.network_latency_s + (row.hop_s if kind == "tcp" else 0.0))


@cache
def _document() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("links.toml").read_text(encoding="utf-8"))


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    """Keys that end in ``_us`` become ``_s``, lists become tuples; ``note`` is for people."""
    fields: dict[str, Any] = {}
    for key, value in row.items():
        if key.endswith("_us"):
            fields[f"{key[:-3]}_s"] = value * 1e-6
        elif key != "note":
            fields[key] = tuple(value) if isinstance(value, list) else value
    return fields


@cache
def _scaleup() -> tuple[ScaleUpLink, ...]:
    return tuple(ScaleUpLink(**_fields(row)) for row in _document()["scaleup"])


@cache
def _scaleout() -> tuple[ScaleOutLink, ...]:
    return tuple(ScaleOutLink(**_fields(row)) for row in _document()["scaleout"])
