"""Energy: E [MWh] = GPU-hours x watts x PUE / 1e6 (arXiv:2104.10350 equation 1).

Watts are a whole node's, per GPU, while training: the node's rating times the share of it that dense pre-training draws.
"""

from __future__ import annotations

from ..catalog.facts import node_over_board, node_watts
from ..spec.cluster import GpuSpec

LOAD = 0.725  # middle of the 60 to 85 % of the maximum that dense pre-training draws; gives 317 W on V100 where GPT-3 measured 330 (arXiv:2104.10350)
PUE = 1.1  # median of PaLM 1.08, LLaMA 1.1, OLMo 1.1, OLMo 2 1.12 and 1.2, BLOOM 1.2 (arXiv:2204.02311, 2302.13971, 2501.00656, 2211.02001)


def rated_watts(gpu: GpuSpec) -> float:
    """A whole node at its rating, per GPU; the median ratio to the board's power where no node is known."""
    known = node_watts(gpu.id)
    return gpu.tdp_w * node_over_board() if known is None else known


def watts(gpu: GpuSpec) -> float:
    """What a GPU and its share of the node draw while training."""
    return LOAD * rated_watts(gpu)


def energy_mwh(gpu: GpuSpec, gpu_hours: float, pue: float = PUE) -> float:
    return gpu_hours * watts(gpu) * pue / 1e6
