"""Clusters: what is left out comes from the catalogue and is named as assumed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.catalog.load import build_cluster
from trainwright.errors import SpecError
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.run import ClusterSection, validate


def cluster(said: str | dict[str, Any]) -> ClusterSpec:
    return build_cluster(validate({"model": "7B", "cluster": said}).cluster)


def test_the_shorthand_is_eight_nodes_of_eight() -> None:
    found = cluster("64xH100")
    assert (found.nodes, found.gpus_per_node, found.scaleup_gpus, found.gpus) == (8, 8, 8, 64)
    assert found.network_bytes_per_s == 50e9
    assert (found.host_memory_bytes, found.nvme_bytes) == (2048e9, 30.7e12)
    assert found.usd_per_gpu_hour == 3.24
    assert [a.split(" ")[0] for a in found.assumed] == ["network", "$3.24"]


def test_a_rack_is_one_domain_of_trays() -> None:
    found = cluster("72xGB200")
    assert (found.nodes, found.gpus_per_node, found.scaleup_gpus) == (18, 4, 72)
    assert any("72 GPUs are joined" in a for a in found.assumed)
    assert cluster({"gpu": "gb200", "nodes": 2, "gpus_per_node": 4}).scaleup_gpus == 8
    assert cluster({"gpu": "gb200", "nodes": 36, "gpus_per_node": 4}).scaleup_gpus == 72


def test_the_shorthand_becomes_nodes_of_the_catalogues_size() -> None:
    assert (cluster("64xtrn2").nodes, cluster("64xtrn2").gpus_per_node) == (4, 16)
    assert (cluster("64xgh200").nodes, cluster("64xgh200").gpus_per_node) == (16, 4)
    assert (cluster("8xgh200").nodes, cluster("8xgh200").gpus_per_node) == (2, 4)
    assert (cluster("8xtrn2").nodes, cluster("8xtrn2").gpus_per_node) == (1, 8)
    assert (cluster("24xtrn2").nodes, cluster("24xtrn2").gpus_per_node) == (3, 8)


def test_one_gpu_alone_makes_the_catalogues_node() -> None:
    found = cluster({"gpu": "h100"})
    assert (found.nodes, found.gpus_per_node) == (1, 8)
    assert "one node" in found.assumed
    assert any(a.startswith("8 GPUs a node") for a in found.assumed)
    assert cluster({"gpu": "gb200"}).gpus_per_node == 4


def test_inside_one_node_no_network_is_assumed() -> None:
    assert not any(a.startswith("network") for a in cluster("8xH100").assumed)


def test_part_of_a_node_has_its_share_of_the_host() -> None:
    whole, half = cluster("8xH100"), cluster("4xH100")
    assert half.host_memory_bytes == whole.host_memory_bytes / 2
    assert half.scaleup_gpus == 4


def test_what_is_said_wins_and_is_not_assumed() -> None:
    said = {
        "gpu": "h100", "nodes": 2, "gpus_per_node": 8, "network_gbps_per_gpu": 100, "host_memory_gb": 512, "nvme_tb": 1, "scaleup_gpus": 4,
        "usd_per_gpu_hour": 1.5, "memory_margin": 0.1,
    }  # fmt: skip
    found = cluster(said)
    assert (found.network_bytes_per_s, found.host_memory_bytes, found.nvme_bytes) == (12.5e9, 512e9, 1e12)
    assert (found.scaleup_gpus, found.usd_per_gpu_hour, found.price_source, found.memory_margin) == (4, 1.5, "given", 0.1)
    assert found.assumed == ()


def test_bridged_cards_are_joined_in_pairs() -> None:
    assert cluster({"gpu": "A100-PCIe-80GB", "nodes": 1, "gpus_per_node": 8}).scaleup_gpus == 2


@given(st.sampled_from(["h100", "gb200", "a100-40gb", "trn2", "tpu-v5p", "3090"]), st.integers(1, 4096))
def test_no_gpu_is_lost_or_invented(gpu: str, total: int) -> None:
    found = cluster(f"{total}x{gpu}")
    assert found.gpus == total
    assert 1 <= found.scaleup_gpus <= max(total, found.gpus_per_node)


def test_more_gpus_than_anyone_has_are_refused() -> None:
    with pytest.raises(SpecError, match=r"cluster.nodes: 10,000,000 nodes of 8 GPUs are more than 10,000,000"):
        build_cluster(ClusterSection(gpu="h100", nodes=10_000_000))
