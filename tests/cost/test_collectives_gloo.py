"""gloo's collectives over links of limited rate and delay: the law against three namespaces' measured times (network.csv, benchmarks/bench_network.py)."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

import trainwright as tw
from trainwright.errors import SpecError

ROWS = list(csv.DictReader(Path(__file__).with_name("network.csv").read_text().splitlines()))
# Payload of the links' packets (MTU 9000, no frames) against that of Ethernet's with an MTU of 1500, which a cluster's rate means.
PAYLOAD = (8948 / 9000) / (1448 / 1538)
CPU = {"id": "node", "cc_or_arch": "cpu", "fp32": 1, "mem_label_gb": 16, "mem_bw_gbs": 10, "link": "loopback"}


def cluster(nodes: int, rate_mbps: float, delay_ms: float) -> dict:
    network = {"network_gbps_per_gpu": rate_mbps / 1e3 * PAYLOAD, "network_latency_us": delay_ms * 1e3}
    return {"gpu": CPU, "nodes": nodes, "gpus_per_node": 1, **network}


def errors(kind: str) -> np.ndarray:
    found = []
    for r in ROWS:
        if r["kind"] == kind:
            on = cluster(int(r["ranks"]), float(r["rate_mbps"]), float(r["delay_ms"]))
            found.append(tw.collective_time(kind, float(r["bytes"]), on, int(r["ranks"])) / float(r["seconds"]) - 1)
    return np.array(found)


@pytest.mark.parametrize(("kind", "most"), [("all_reduce", 0.08), ("all_gather", 0.08), ("reduce_scatter", 0.08), ("send_recv", 0.04)])
def test_measured_links(kind: str, most: float) -> None:
    """Three rates, three delays, three sizes, nothing fitted."""
    found = errors(kind)
    assert len(found) == 27
    assert np.abs(found).mean() < most


def test_reduce_scatter_sends_what_an_all_reduce_sends() -> None:
    """The devices' own counters: PyTorch's gloo backend has no reduce-scatter of its own."""
    sent = {(r["kind"], r["bytes"], r["rate_mbps"], r["delay_ms"]): float(r["sent_bytes"]) for r in ROWS}
    for (kind, size, *link), moved in sent.items():
        if kind == "reduce_scatter" and int(size) > 2**20:
            assert moved == pytest.approx(sent["all_reduce", size, *link], rel=0.03)
            assert moved == pytest.approx(2 * 2 / 3 * int(size), rel=0.05)


def test_small_messages_cost_latencies() -> None:
    """Two latencies a round: an all-reduce of n ranks has 2 (n - 1) rounds, an all-gather half of them."""
    for n in (2, 3, 4):
        on = cluster(n, 1e6, 10)
        assert tw.collective_time("all_reduce", 64, on, n) == pytest.approx(2 * (n - 1) * 2 * 10.05e-3, rel=0.01)
        assert tw.collective_time("all_gather", 64, on, n) == pytest.approx((n - 1) * 2 * 10.05e-3, rel=0.01)


def test_large_messages_cost_bytes() -> None:
    on = cluster(4, 1000, 0.1)
    rate = 1e9 / 8 * 8948 / 9000
    assert tw.collective_time("all_reduce", 2**30, on, 4) == pytest.approx(2 * 3 / 4 * 2**30 / rate, rel=0.03)


def test_only_gloo_s_algorithms() -> None:
    with pytest.raises(SpecError, match="algorithm"):
        tw.collective_time("all_reduce", 2**20, cluster(4, 1000, 1), 4, algorithm="nvls")


def test_latency_of_a_cluster_of_gpus() -> None:
    """A stated latency takes the place of the kind of network's own."""
    near, far = ({"gpu": "h100", "nodes": 2, "gpus_per_node": 8, "network_latency_us": us} for us in (5, 500))
    assert tw.collective_time("all_reduce", 1024, far, 16) > 10 * tw.collective_time("all_reduce", 1024, near, 16)
