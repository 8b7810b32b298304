"""Clusters: what a run spec says of its GPUs, with the rest taken from the catalogue and named as assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import SpecError
from ..spec.cluster import ClusterSpec, GpuSpec
from .gpus import load_gpu
from .prices import default_price

if TYPE_CHECKING:  # the catalogue alone needs no pydantic
    from ..spec.run import ClusterSection

MOST_GPUS = 10_000_000
SHORTHAND_NODE = 8  # GPUs a node that the shorthand "64xGPU" is read as before the GPU is known


def build_cluster(section: ClusterSection, catalog_files: Sequence[str] = ()) -> ClusterSpec:
    """A `ClusterSpec` with every field filled; `ClusterSpec.assumed` has one sentence for each value that the section left out.

    Left out, ``gpus_per_node`` is the catalogue's typical node and ``nodes`` one. A rack of 72 GPUs (NVL72) is one scale-up domain of trays
    of 4: nodes larger than a tray are counted as trays. Nodes of eight, which is what ``64xGPU`` is read as, are regrouped to the catalogue's
    node where that has another size and divides the whole. `SpecError` where the whole has more than 10,000,000 GPUs.
    """
    gpu = load_gpu(section.gpu, catalog_files)
    assumed: list[str] = []
    nodes, per_node = _nodes(section, gpu, assumed)
    scaleup = section.scaleup_gpus or _scaleup(gpu, nodes, per_node)
    gbps = section.network_gbps_per_gpu
    if gbps is None:
        gbps = gpu.nic_default_gbps
        if nodes * per_node > scaleup:
            assumed.append(f"network of {gbps:g} Gb/s a GPU and direction (the catalogue's default for {gpu.id})")
    host = section.host_memory_gb * 1e9 if section.host_memory_gb is not None else _share(gpu.host_memory_bytes, per_node, gpu)
    nvme = section.nvme_tb * 1e12 if section.nvme_tb is not None else _share(gpu.nvme_bytes, per_node, gpu)
    usd, why = section.usd_per_gpu_hour, "given"
    if usd is None:
        usd, why = default_price(gpu.id, catalog_files)
        if usd is not None:
            assumed.append(f"${usd:.2f} a GPU-hour ({why})")
    return ClusterSpec(
        gpu=gpu,
        nodes=nodes,
        gpus_per_node=per_node,
        scaleup_gpus=scaleup,
        network_bytes_per_s=gbps * 1e9 / 8,
        memory_margin=section.memory_margin,
        network_latency_s=None if section.network_latency_us is None else section.network_latency_us * 1e-6,
        host_memory_bytes=host,
        nvme_bytes=nvme,
        usd_per_gpu_hour=usd,
        price_source=why,
        assumed=tuple(assumed),
    )


def _nodes(section: ClusterSection, gpu: GpuSpec, assumed: list[str]) -> tuple[int, int]:
    per_node, nodes = section.gpus_per_node, section.nodes
    if per_node is None:
        per_node = gpu.gpus_per_node
        assumed.append(f"{per_node} GPUs a node (the catalogue's node of {gpu.id})")
    if nodes is None:
        nodes = 1
        assumed.append("one node")
    size, total = gpu.gpus_per_node, nodes * per_node
    rack = gpu.scaleup_gpus > size and per_node > size
    shorthand = per_node == SHORTHAND_NODE and (nodes > 1 or size < per_node)
    if per_node != size and total % size == 0 and (rack or shorthand):
        nodes, per_node = total // size, size
        joined = f"; {gpu.scaleup_gpus} GPUs are joined by its link" if gpu.scaleup_gpus > size else ""
        assumed.append(f"nodes of {size} GPUs (the catalogue's node of {gpu.id}{joined})")
    if nodes * per_node > MOST_GPUS:
        raise SpecError(f"{nodes:,} nodes of {per_node} GPUs are more than {MOST_GPUS:,} GPUs", "cluster.nodes", [MOST_GPUS // per_node])
    return nodes, per_node


def _scaleup(gpu: GpuSpec, nodes: int, per_node: int) -> int:
    """A rack-scale link joins GPUs across nodes; any other ends at the node. Where it joins a whole typical node, it also joins a larger one (the
    16 V100 of a DGX-2)."""
    if per_node > gpu.gpus_per_node == gpu.scaleup_gpus:
        return per_node
    reach = nodes * per_node if gpu.scaleup_gpus > gpu.gpus_per_node else per_node
    return max(1, min(gpu.scaleup_gpus, reach))


def _share(whole_node: float | None, per_node: int, gpu: GpuSpec) -> float | None:
    """What a node of `per_node` GPUs has of the catalogue's typical node: its share, and never more than the whole."""
    return None if whole_node is None else whole_node * min(1.0, per_node / gpu.gpus_per_node)
