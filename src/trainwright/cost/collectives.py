"""What a collective costs in seconds, from its size, the group and the topology.

A group of n ranks that are `stride` apart is cut by the scale-up domains of the cluster into k domains of g members. Bandwidth inside a
domain is that of the link, between domains that of the members' own NICs (other groups that run at the same time use the other NICs).

    algorithm     bytes that one GPU (or one domain, between domains) sends for a message S
    ring          all-reduce 2 (n-1)/n S, others (n-1)/n S, over the slower of link and the domain's NICs
    tree          double binary tree of domains (all-reduce): S for two, 3/2 S for three, 2 S for more; a chain of 2 S inside
    pat           gathers and scatters of one GPU a node: the ring's bytes in log2 n steps at three quarters of its rate
    nvls          the switch reduces: S (1 + 1/n) each way
    nvls-tree     nvls inside, tree between
    hierarchical  reduce-scatter inside, all-reduce between, all-gather inside
    pairwise      all-to-all: (g-1)/n S over the link at the same time as (n-g)/n S over the NIC; send_recv: S

Each takes start + steps x hop + transfer. Inside a domain a transfer is bytes / rate x (1 + (half / S)^power); between domains the
shorter of a low-latency protocol at a share of the rate and a bulk protocol that fills its pipeline first. Without a given algorithm the
fastest one that the hardware has is taken, as NCCL's tuner does. Between CPUs: gloo's
algorithms (`collectives_gloo`). Sources: Thakur et al. 2005 (ring), arXiv:0904.4223 (double tree), NCCL
src/graph/tuning.cc (latencies), constants: ``links.toml``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..catalog.links import ScaleOutLink, ScaleUpLink, pcie_link, scaleout_link, scaleup_link
from ..errors import SpecError, unknown
from ..spec.cluster import ClusterSpec
from .collectives_gloo import GLOO, measured
from .table import Column

BoolColumn = NDArray[np.bool_]

# What parallel aggregated trees reach of a ring's rate (NCCL src/graph/tuning.cc).
PAT_SHARE = 0.75
# With fewer GPUs a ring is as fast as in-network reduction, and NCCL does not offer it.
SMALLEST_NVLS = 5


@dataclass(frozen=True)
class _Group:
    """Columns of one call: message S, ranks n, members g of a domain, domains k; rates in bytes/s."""

    size: Column
    n: Column
    g: Column
    k: Column
    link: ScaleUpLink
    net: ScaleOutLink
    link_rate: Column
    nic_rate: float

    @property
    def rack(self) -> bool:
        """Whether the link joins several hosts. Between racks NCCL has no tree of switch-reduced domains, and takes rings."""
        return self.link.network_channels > 0

    @property
    def many(self) -> BoolColumn:
        return self.k > 1

    def domain_nics(self, share: float) -> Column:
        """Bytes/s out of a domain through the NICs of its members; infinite inside one domain."""
        nics = np.minimum(self.g, self.link.network_channels) if self.rack else self.g
        return np.where(self.many, nics * self.nic_rate * share, np.inf)

    def ramp(self, half: float, power: float) -> Column:
        """1 + (half / S)^power: how much longer than at full rate."""
        return 1 + (half / np.maximum(self.size, 1)) ** power

    def through_network(self, wire: Column, inside: Column | float = 0.0) -> Column:
        """A transfer of `wire` seconds at full rate between domains, beside `inside` seconds on the links: short by the low-latency
        protocol, long after filling a pipeline."""
        fill = np.ceil(np.log2(np.maximum(self.k, 1))) * self.net.fill_s
        return np.minimum(np.maximum(wire * self.small_slowdown, inside), fill + np.maximum(wire, inside))

    @property
    def small_slowdown(self) -> float:
        """How many times longer than at full rate the low-latency protocol takes."""
        return self.nic_rate / min(self.net.small_bytes_per_s, self.nic_rate / 4)

    def over_both(self, inside: Column, between: Column) -> Column:
        """Seconds on the wire from those at full rate: on the links of a domain, and between domains."""
        return np.where(self.many, self.through_network(between, inside), inside * self.ramp(self.link.half_bytes, self.link.power))

    def ring_hops(self, rounds: int) -> Column:
        """Seconds of hops for `rounds` trips around the ring; every domain is entered once a trip."""
        far = np.where(self.many, self.k - 1, 0)
        return rounds * ((self.n - 1 - far) * self.link.hop_s + far * self.net.hop_s)


def _ring(c: _Group, rounds: int) -> Column:
    """`rounds` trips of (n-1)/n S: two for an all-reduce, one for a gather or a scatter."""
    moved = rounds * (c.n - 1) / c.n * c.size
    inside = moved / (c.link_rate * c.link.ring)
    between = moved / c.domain_nics(c.net.ring)
    return c.link.start_s + c.ring_hops(rounds) + c.over_both(inside, between)


def _pat(c: _Group) -> Column:
    """Parallel aggregated trees: one trip of a ring's bytes in log2 n steps, at a lower rate (NCCL 2.23 and later, one GPU a node)."""
    between = (c.n - 1) / c.n * c.size / (c.domain_nics(c.net.ring) * PAT_SHARE)
    return c.link.start_s + np.ceil(np.log2(c.n)) * c.net.hop_s + c.through_network(between)


def _tree_load(k: Column) -> Column:
    """Messages S that the busiest domain of a double binary tree of k sends, up and down: 1 for two, 3/2 for three, 2 for more."""
    return np.select([k <= 1, k == 2, k == 3], [0.0, 1.0, 1.5], 2.0)


def _tree_hops(c: _Group) -> Column:
    return 2 * ((c.g - 1) * c.link.hop_s + np.ceil(np.log2(np.maximum(c.k, 1))) * c.net.hop_s)


def _tree(c: _Group) -> Column:
    """All-reduce: up and down; the chain inside a domain carries S each way, the tree's edges run both ways at once."""
    inside = np.where(c.g > 1, 2 * c.size / (c.link_rate * c.link.ring), 0.0)
    between = _tree_load(c.k) * c.size / c.domain_nics(c.net.tree)
    return c.link.start_s + _tree_hops(c) + c.over_both(inside, between)


def _nvls_wire(c: _Group) -> Column:
    share = max(c.link.in_network, 1e-9)
    return c.size * (1 + 1 / c.g) / (c.link_rate * share) * c.ramp(c.link.in_network_half_bytes, c.link.in_network_power)


def _nvls(c: _Group) -> Column:
    return _nvls_hops(c) + _nvls_wire(c)


def _nvls_hops(c: _Group) -> Column:
    return c.link.in_network_start_s + c.g * c.link.in_network_hop_s


def _nvls_tree(c: _Group) -> Column:
    between = c.through_network(_tree_load(c.k) * c.size / c.domain_nics(c.net.in_network_tree))
    hops = 2 * np.ceil(np.log2(np.maximum(c.k, 1))) * c.net.hop_s
    return _nvls_hops(c) + hops + np.maximum(_nvls_wire(c), between)


def _hierarchical(c: _Group) -> Column:
    inside = 2 * (c.g - 1) / c.g * c.size / (c.link_rate * c.link.ring) * c.ramp(c.link.half_bytes, c.link.power)
    between = np.where(c.many, c.through_network(2 * (c.k - 1) / c.k * c.size / c.domain_nics(c.net.ring)), 0.0)
    hops = 2 * ((c.g - 1) * c.link.hop_s + np.where(c.many, (c.k - 1) * c.net.hop_s, 0.0))
    return 2 * c.link.start_s + hops + inside + between


def _broadcast_tree(c: _Group) -> Column:
    return c.link.start_s + _tree_hops(c) / 2 + _stream(c, c.net.tree)


def _broadcast_ring(c: _Group) -> Column:
    return c.link.start_s + c.ring_hops(1) + _stream(c, c.net.ring)


def _stream(c: _Group, share: float) -> Column:
    """A message that every member passes on once."""
    inside = c.size / (c.link_rate * c.link.ring)
    return c.over_both(inside, c.size / c.domain_nics(share))


def _all_to_all(c: _Group) -> Column:
    """Every pair at once: what stays inside goes over the link while the rest goes through the own NIC."""
    inside = (c.g - 1) / c.n * c.size / (c.link_rate * c.link.exchange) * c.ramp(c.link.half_bytes, c.link.power)
    between = np.where(c.many, c.through_network((c.n - c.g) / c.n * c.size / (c.nic_rate * c.net.exchange)), 0.0)
    hops = np.where(c.many, c.net.hop_s, c.link.hop_s) + c.link.hop_s * (c.n - 1)
    return c.link.start_s + hops + np.maximum(inside, between)


def _pair(c: _Group) -> Column:
    """One send and its receive; where members stand in several domains the slowest pair crosses the network."""
    inside = c.size / (c.link_rate * c.link.pair) * c.ramp(c.link.half_bytes, c.link.power)
    between = c.size / (c.nic_rate * c.net.exchange)
    wire = np.where(c.many, np.minimum(between * c.small_slowdown, c.net.fill_s + between), inside)
    return c.link.start_s + np.where(c.many, c.net.hop_s, c.link.hop_s) + wire


ALGORITHMS: dict[str, dict[str, Callable[[_Group], Column]]] = {
    "all_reduce": {
        "ring": lambda c: _ring(c, 2),
        "tree": _tree,
        "nvls": _nvls,
        "nvls-tree": _nvls_tree,
        "hierarchical": _hierarchical,
    },
    "all_gather": {"ring": lambda c: _ring(c, 1), "pat": _pat},
    "reduce_scatter": {"ring": lambda c: _ring(c, 1), "pat": _pat},
    "broadcast": {"ring": _broadcast_ring, "tree": _broadcast_tree},
    "all_to_all": {"pairwise": _all_to_all},
    "send_recv": {"pairwise": _pair},
}


def _available(name: str, c: _Group) -> BoolColumn:
    """Where the hardware can run an algorithm at all."""
    if name == "pat":
        return c.many & (c.g == 1)
    if name == "nvls":
        return ~c.many & (c.n >= SMALLEST_NVLS) & bool(c.link.in_network)
    if name == "nvls-tree":
        return c.many & (c.g > 1) & bool(c.link.in_network) & (not c.rack)
    return np.ones(c.n.shape, dtype=bool)


def _considered(name: str, c: _Group) -> BoolColumn:
    """What the library takes by itself."""
    if name == "hierarchical":
        return np.zeros(c.n.shape, dtype=bool)
    if name == "tree":
        return np.full(c.n.shape, not c.rack)
    return np.ones(c.n.shape, dtype=bool)


def collective_seconds(
    kind: str,
    bytes: ArrayLike,
    cluster: ClusterSpec,
    ranks: ArrayLike,
    stride: ArrayLike = 1,
    algorithm: str | None = None,
) -> Column:
    """Seconds of a collective, for columns of whole-message bytes, group sizes and distances of members in global ranks (broadcast
    together).

    `kind`: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send_recv. A group of one costs nothing. `algorithm` fixes what
    is otherwise the fastest; raises `SpecError` for an unknown kind or algorithm, or one that the hardware does not have for some group.
    """
    if kind not in ALGORITHMS:
        raise unknown("collective", kind, ALGORITHMS, "kind")
    choices = (GLOO if cluster.gpu.is_cpu else ALGORITHMS)[kind]
    if algorithm is not None and algorithm not in choices:
        raise unknown(f"algorithm of {kind}", algorithm, choices, "algorithm")
    size, n, distance = np.broadcast_arrays(np.asarray(bytes, dtype=np.float64), np.asarray(ranks), np.asarray(stride))
    linked = _group(size, cluster, n, distance, pcie=False)
    seconds = _fastest(choices, linked, algorithm, cluster)
    if cluster.scaleup_gpus < cluster.gpus_per_node or not cluster.gpu.link_bytes_per_s:
        # what reaches beyond the linked GPUs of a node runs at the pace of PCIe
        joined = _group(size, cluster, n, distance, pcie=True)
        seconds = np.where(linked.many, _fastest(choices, joined, algorithm, cluster), seconds)
    if cluster.gpu.measured and algorithm is None:
        seconds = measured(cluster.gpu.measured.collectives, kind, linked, seconds)
    return np.where((linked.n > 1) & (linked.size > 0), seconds, 0.0)


def _fastest(choices: dict[str, Callable[[_Group], Column]], group: _Group, algorithm: str | None, cluster: ClusterSpec) -> Column:
    """Seconds by the given algorithm, or by the fastest of those that the hardware has and the library takes by itself."""
    if algorithm is not None:
        lacks = (group.n > 1) & ~_available(algorithm, group)
        if lacks.any():
            can = [name for name in choices if _available(name, group).all()]
            raise SpecError(f"{int(group.n[lacks][0])} x {cluster.gpu.id} cannot run {algorithm}", "algorithm", can)
        return choices[algorithm](group)
    best = np.full(group.n.shape, np.inf)
    for name, seconds in choices.items():
        usable = _available(name, group) & _considered(name, group)
        if usable.any():
            best = np.where(usable, np.minimum(best, seconds(group)), best)
    return best


def collective_time(kind: str, bytes: float, cluster: ClusterSpec, gpus: int, algorithm: str | None = None) -> float:
    """Seconds of one collective among the first `gpus` GPUs of the cluster; `bytes` is the whole message as for `collective_seconds`."""
    if not 1 <= gpus <= cluster.gpus:
        raise SpecError(f"{gpus} GPUs are not between 1 and the cluster's {cluster.gpus}", "gpus", [str(min(max(gpus, 1), cluster.gpus))])
    if not 0 <= bytes < float("inf"):
        raise SpecError(f"{bytes} bytes are no size", "bytes")
    return float(collective_seconds(kind, float(bytes), cluster, gpus, 1, algorithm))


def _group(size: Column, cluster: ClusterSpec, ranks: NDArray[np.int64], stride: NDArray[np.int64], pcie: bool) -> _Group:
    """The group cut by scale-up domains; with `pcie` by nodes, whose GPUs PCIe joins."""
    gpu = cluster.gpu
    n = np.maximum(ranks, 1).astype(np.float64)
    domain = max(1, cluster.gpus_per_node if pcie else cluster.scaleup_gpus)
    g = np.minimum(np.maximum(domain // np.maximum(stride, 1), 1), n).astype(np.float64)
    nominal = gpu.pcie_bytes_per_s if pcie or not gpu.link_bytes_per_s else gpu.link_bytes_per_s
    rate = np.full(n.shape, max(nominal, 1.0))
    if gpu.link_pair_bytes_per_s and not pcie:
        # links that join pairs directly add up: g ranks use g - 1 of them
        rate = np.minimum(rate, gpu.link_pair_bytes_per_s * np.maximum(g - 1, 1))
    return _Group(
        size=np.maximum(size, 0),
        n=n,
        g=g,
        k=np.ceil(n / g),
        link=pcie_link() if pcie else scaleup_link(gpu),
        net=scaleout_link(cluster),
        link_rate=rate,
        nic_rate=max(cluster.network_bytes_per_s, 1.0),
    )
