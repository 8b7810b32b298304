"""Collectives over links of limited rate and delay: real rendezvous, real bytes, several "nodes" on one machine.

    sudo python benchmarks/bench_network.py [--nodes 3] [--rates 50,100,200] [--delays 1,3,9] [--json FILE] [--check]

Each node is a network namespace. `torchrun` starts one rank in each, they meet by c10d rendezvous, and gloo moves the bytes. A link has the rate that `tc`
gives it and a one-way delay: veth pairs on a bridge with netem where the kernel has it, otherwise tun devices with tbf, whose packets wait in a relay of
this program. The time of every collective is held against ``trainwright.cost.collectives`` for a cluster with that rate and latency: nothing is fitted here.
``--check`` ends with status 1 where the mean error of all-reduce is 8 % or more. Needs root (namespaces); without it says so and ends with status 0.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
SIZES = (2**16, 2**20, 2**23)
MTU = 9000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
ERROR_BOUND = 0.08


@dataclass(frozen=True)
class Link:
    """Mbit/s and one-way milliseconds."""

    rate: float
    delay: float


def sh(command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command.split(), check=check, capture_output=True, text=True)


def namespace(i: int) -> str:
    return f"tw{os.getpid()}n{i}"


def has_netem() -> bool:
    """Whether the kernel can delay packets itself."""
    name = f"tw{os.getpid()}"
    sh(f"ip link add {name} type dummy", check=False)
    found = sh(f"tc qdisc add dev {name} root netem delay 1ms", check=False).returncode == 0
    sh(f"ip link del {name}", check=False)
    return found


class Relay(threading.Thread):
    """Moves packets between tun devices, each `delay_s` after it came out of its sender's queue."""

    def __init__(self, files: list[int]) -> None:
        super().__init__(daemon=True)
        self.files, self.delay_s, self.stop = files, 0.0, False

    def run(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        count = 0
        poll = select.epoll()
        for f in self.files:
            poll.register(f, select.EPOLLIN)
        while not self.stop:
            pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for f, _ in poll.poll(pause):
                with contextlib.suppress(BlockingIOError):
                    for _ in range(32):
                        packet = os.read(f, MTU + 64)
                        last = packet[19] if len(packet) >= 20 and packet[0] >> 4 == 4 else 0
                        if 1 <= last <= len(self.files):
                            count += 1
                            heapq.heappush(waiting, (time.monotonic() + self.delay_s, count, last - 1, packet))
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, target, packet = heapq.heappop(waiting)
                with contextlib.suppress(BlockingIOError, OSError):
                    os.write(self.files[target], packet)


@contextlib.contextmanager
def nodes(n: int, netem: bool) -> Iterator[Relay | None]:
    """`n` namespaces with a device ``net0`` and address 10.77.0.(i+1) each."""
    relay, files = None, []
    bridge = f"tw{os.getpid()}b"
    try:
        if netem:
            sh(f"ip link add {bridge} type bridge")
            sh(f"ip link set {bridge} up")
        for i in range(n):
            ns = namespace(i)
            sh(f"ip netns add {ns}")
            device = f"tw{os.getpid()}v{i}"
            if netem:
                sh(f"ip link add {device} mtu {MTU} type veth peer name {device}p")
                sh(f"ip link set {device} master {bridge}")
                sh(f"ip link set {device} up")
                sh(f"ip link set {device}p netns {ns}")
                sh(f"ip netns exec {ns} ip link set {device}p name net0 gso_max_segs 1")
            else:
                f = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                fcntl.ioctl(f, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
                files.append(f)
                sh(f"ip link set {device} netns {ns}")
                sh(f"ip netns exec {ns} ip link set {device} name net0")
            for line in (f"link set net0 mtu {MTU}", f"addr add 10.77.0.{i + 1}/24 dev net0", "link set net0 up", "link set lo up"):
                sh(f"ip netns exec {ns} ip {line}")
            # the default of most distributions; BBR's probing would be measured with the collective
            sh(f"ip netns exec {ns} sysctl -qw net.ipv4.tcp_congestion_control=cubic", check=False)
        if not netem:
            relay = Relay(files)
            relay.start()
        yield relay
    finally:
        if relay:
            relay.stop = True
            relay.join(2)
        for f in files:
            os.close(f)
        for i in range(n):
            sh(f"ip netns del {namespace(i)}", check=False)
        if netem:
            sh(f"ip link del {bridge}", check=False)


def limit(n: int, link: Link, relay: Relay | None) -> None:
    """Gives every node's device that rate and delay."""
    for i in range(n):
        if relay is None:
            queue = f"netem delay {link.delay}ms rate {link.rate}mbit limit 20000"
        else:
            queue = f"tbf rate {link.rate}mbit burst {MTU} limit 16000000"
        sh(f"ip netns exec {namespace(i)} tc qdisc replace dev net0 root {queue}")
    if relay:
        relay.delay_s = link.delay / 1e3


def wait_for(path: Path, process: list[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end or any(p.poll() not in (None, 0) for p in process):
            raise RuntimeError(f"no {path.name}: a rank failed or took longer than {seconds:.0f} s")
        time.sleep(0.02)


def measure(n: int, links: list[Link], netem: bool, sizes: tuple[int, ...], log: Path | None) -> list[dict[str, float | str | int]]:
    """Rows of kind, bytes, rate, delay, seconds: one torchrun a node, all links after one another."""
    with tempfile.TemporaryDirectory() as folder, nodes(n, netem) as relay, open(log or os.devnull, "wb") as out:
        limit(n, Link(1000, 0.1), relay)
        started = []
        for i in range(n):
            command = ["ip", "netns", "exec", namespace(i), "env", "GLOO_SOCKET_IFNAME=net0", "TP_SOCKET_IFNAME=net0", "OMP_NUM_THREADS=1"]
            command += [sys.executable, "-m", "torch.distributed.run", f"--nnodes={n}", "--nproc-per-node=1", "--rdzv-backend=c10d"]
            command += [
                "--rdzv-endpoint=10.77.0.1:29400",
                "--rdzv-id=network",
                f"--rdzv-conf=is_host={int(i == 0)}",
                f"--local-addr=10.77.0.{i + 1}",
                "--max-restarts=0",
            ]
            command += [__file__, "--rank-in", folder, "--links", str(len(links)), "--sizes", ",".join(map(str, sizes))]
            started.append(subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True))
        rows: list[dict[str, float | str | int]] = []
        try:
            wait_for(Path(folder, "ready"), started, 180)
            for k, link in enumerate(links):
                limit(n, link, relay)
                Path(folder, f"go{k}").touch()
                wait_for(Path(folder, f"done{k}"), started, 300)
                rows += [{**r, "rate_mbps": link.rate, "delay_ms": link.delay} for r in json.loads(Path(folder, f"done{k}").read_text())]
        finally:
            for p in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    p.wait(10)
                if p.poll() is None:
                    os.killpg(p.pid, signal.SIGKILL)
                    p.wait()
        return rows


def rank(folder: str, links: int, sizes: tuple[int, ...]) -> None:
    """One rank under torchrun: times every kind and size each time the links have changed."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    me, n = dist.get_rank(), dist.get_world_size()
    sent = lambda: int(Path("/sys/class/net/net0/statistics/tx_bytes").read_text())  # noqa: E731
    if me == 0:
        Path(folder, "ready").touch()
    for k in range(links):
        while not Path(folder, f"go{k}").exists():
            time.sleep(0.01)
        dist.barrier()
        latency = one_way(me)
        rows = []
        for kind in KINDS:
            for size in sizes:
                call = _call(kind, size, me, n)
                for _ in range(2):
                    call()
                taken = []
                before = sent()
                repeats = 5 if size < 2**22 else 3
                for _ in range(repeats):
                    start = together()
                    call()
                    mine = torch.tensor([time.monotonic() - start], dtype=torch.float64)
                    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
                    taken.append(float(mine))
                moved = (sent() - before) / repeats
                rows.append({"kind": kind, "bytes": size, "ranks": n, "seconds": sorted(taken)[len(taken) // 2], "sent": moved})
                rows[-1]["latency_ms"] = latency * 1e3
        if me == 0:
            target = Path(folder, f"part{k}")
            target.write_text(json.dumps(rows))
            target.rename(Path(folder, f"done{k}"))
    dist.barrier()
    dist.destroy_process_group()


def together() -> float:
    """A moment that no rank has passed yet, waited for: a barrier lets ranks go one after another. The ranks of one machine share its clock."""
    import torch
    import torch.distributed as dist

    moment = torch.tensor([time.monotonic() + 0.06], dtype=torch.float64)
    dist.all_reduce(moment, op=dist.ReduceOp.MAX)
    pause = float(moment) - time.monotonic()
    if pause > 0.002:
        time.sleep(pause - 0.002)
    while time.monotonic() < float(moment):
        pass
    return float(moment)


def one_way(me: int) -> float:
    """Half of the shortest of 20 round trips of a small datagram between the first two nodes: what `ping` says of a link."""
    import torch.distributed as dist

    shortest = 1.0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.bind((f"10.77.0.{me + 1}", 29500))
        s.settimeout(5.0)
        dist.barrier()
        if me == 0:
            for _ in range(20):
                start = time.monotonic()
                s.sendto(b"ping", ("10.77.0.2", 29500))
                s.recv(16)
                shortest = min(shortest, time.monotonic() - start)
            s.sendto(b"stop", ("10.77.0.2", 29500))
        while me == 1 and s.recv(16) != b"stop":
            s.sendto(b"pong", ("10.77.0.1", 29500))
        dist.barrier()
    return shortest / 2


def _call(kind: str, size: int, me: int, n: int):
    import torch
    import torch.distributed as dist

    elements = size // 4 // n * n
    whole, part = torch.ones(elements), torch.ones(elements // n)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)

    def pair() -> None:
        if me == 0:
            dist.send(whole, 1)
        elif me == 1:
            dist.recv(whole, 0)

    return pair


# A cluster states Ethernet's rate, of which the model takes the payload at an MTU of 1500; these links have larger packets and no frames around them.
PAYLOAD = ((MTU - 52) / MTU) / (1448 / 1538)
NODE = {"id": "node", "cc_or_arch": "cpu", "fp32": 1, "mem_label_gb": 16, "mem_bw_gbs": 10, "link": "loopback"}


def predicted(row: dict) -> float:
    """Seconds by the package's own model for CPUs with that network: the rate that tc was given, the latency of a datagram."""
    from trainwright import collective_time

    cluster = {"gpu": NODE, "nodes": row["ranks"], "gpus_per_node": 1}
    cluster |= {"network_gbps_per_gpu": row["rate_mbps"] / 1e3 * PAYLOAD, "network_latency_us": row["latency_ms"] * 1e3}
    return collective_time(row["kind"], float(row["bytes"]), cluster, row["ranks"])


def numbers(text: str) -> list[float]:
    return [float(x) for x in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rates", type=numbers, default=[50.0, 100.0, 200.0], help="Mbit/s")
    parser.add_argument("--delays", type=numbers, default=[1.0, 3.0, 9.0], help="one-way milliseconds")
    parser.add_argument("--sizes", type=numbers, default=SIZES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, help="what torchrun prints")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rank-in", help=argparse.SUPPRESS)
    parser.add_argument("--links", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = tuple(int(s) for s in args.sizes)
    if args.rank_in:
        rank(args.rank_in, args.links, sizes)
        return 0
    if os.geteuid() != 0 or sh("ip netns list", check=False).returncode != 0:
        print("skipped: network namespaces need root and iproute2")
        return 0
    links = [Link(r, d) for r in args.rates for d in args.delays]
    netem = has_netem()
    print("links:", "veth with netem" if netem else "tun with tbf and a relay for the delay (this kernel has no netem)")
    rows = measure(args.nodes, links, netem, sizes, args.log)
    for r in rows:
        r["predicted"] = predicted(r)
        r["error"] = r["predicted"] / r["seconds"] - 1
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return report(rows) if args.check else report(rows) * 0


def report(rows: list[dict]) -> int:
    for r in rows:
        print(
            f"{r['kind']:15s} {r['bytes']:>9,d} B {r['rate_mbps']:6g} Mbit/s {r['latency_ms']:6.2f} ms  measured {r['seconds'] * 1e3:9.2f} ms"
            f"  predicted {r['predicted'] * 1e3:9.2f} ms  {r['error']:+7.1%}"
        )
    mean = {k: [abs(r["error"]) for r in rows if r["kind"] == k] for k in KINDS}
    for kind, errors in mean.items():
        print(f"{kind:15s} mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%} of {len(errors)}")
    return int(sum(mean["all_reduce"]) / len(mean["all_reduce"]) >= ERROR_BOUND)


if __name__ == "__main__":
    sys.exit(main())
