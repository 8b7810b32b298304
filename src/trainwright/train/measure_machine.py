"""How fast this machine is, in seconds: matrix products, attention, memory-bound kernels, the optimizer, collectives. `measure.machine` turns them into laws.

Every rank measures the same thing at the same time, as in training: cores share caches, memory bandwidth and clocks. Times are the shortest of several
batches of calls, since other programs only ever add; on a CPU each is related to a pulse before it, and the median of batches counts, of messages the mean of
the faster half. Inputs take turns, so that a cache does not hold what training would not leave there.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import measure_host
from .config import Numbers
from .kernels import attend
from .modules import ACTIVATIONS, RMSNorm, rotate
from .parallelize import DTYPES
from .pulse import Pulse
from .ranks import answer, joined

TOKENS, WIDTHS = (
    (128, 512, 2048),
    ((128, 128), (128, 512), (512, 128), (384, 384), (256, 1024), (1024, 256), (512, 2048), (2048, 512), (1024, 1024)),
)
GPU_TOKENS, GPU_WIDTHS = (2048, 8192), ((1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192))
SIZES = (2**12, 2**15, 2**18, 2**20, 2**22, 2**24)
FIRST_BEATS = 200  # two to three seconds
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")


class Clock:
    """Seconds of a call, on the CPU's clock or the GPU's. On a CPU those at its fastest pulse: each batch of calls is related to the pulse before it."""

    def __init__(self, device: torch.device, batch_s: float, batches: int) -> None:
        self.device, self.batch_s, self.batches = device, batch_s, batches
        self.alone = device.type == "cpu" and torch.get_num_threads() == 1
        self.pulse = Pulse() if device.type == "cpu" else None
        self.fastest = min(self._beat() for _ in range(FIRST_BEATS)) if self.pulse else 1.0

    def _beat(self) -> float:
        return self.pulse.seconds(self.now) if self.pulse else 1.0

    def share(self) -> float:
        """Of what is measured next: what it would take at the fastest pulse. 1 on a GPU."""
        return self.fastest / self._beat()

    def now(self) -> float:
        """A single thread's own time on its core, which other programs do not lengthen, where one thread does all the work; else the wall's."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.thread_time() if self.alone else time.perf_counter()

    def __call__(self, work: Callable[[], object]) -> float:
        work()
        start = self.now()
        work()
        once = max(self.now() - start, 1e-7)
        count = max(1, min(10_000, round(self.batch_s / once)))
        taken = []
        for _ in range(self.batches):
            share = self.share()
            start = self.now()
            for _ in range(count):
                work()
            taken.append((self.now() - start) / count * share)
        return statistics.median(taken) if self.pulse else min(taken)


def turns(*made: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """One set of tensors after another."""
    every = itertools.cycle(zip(*made, strict=True))
    return lambda: list(next(every))


def many(device: torch.device, dtype: torch.dtype, *shape: int, count: int = 4, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(*shape, device=device, dtype=dtype, requires_grad=grad) for _ in range(count)]


def products(clock: Clock, dtype: torch.dtype) -> list[list[float]]:
    """[m, n, k, seconds] of y[m, n] = x[m, k] w[k, n] as forward and both backward products of a linear layer run them."""
    found: list[list[float]] = []
    device, large = clock.device, clock.device.type == "cuda"
    for m in GPU_TOKENS if large else TOKENS:
        for n, k in GPU_WIDTHS if large else WIDTHS:
            if not large and m * n * k > 3e9:
                continue
            x, w, g = (many(device, dtype, *shape, count=2) for shape in ((m, k), (n, k), (m, n)))
            take = turns(x, w, g)

            def forward(take: Any = take) -> object:
                a, b, _ = take()
                return F.linear(a, b)

            def to_input(take: Any = take) -> object:
                _, b, c = take()
                return c @ b

            def to_weight(take: Any = take) -> object:
                a, _, c = take()
                return c.T @ a

            found += [[m, n, k, clock(forward)], [m, k, n, clock(to_input)], [n, k, m, clock(to_weight)]]
    return found


def with_backward(clock: Clock, take: Callable[[], list[torch.Tensor]], work: Callable[..., torch.Tensor]) -> tuple[float, float]:
    """Seconds of a function without and of its backward pass."""

    def forward() -> object:
        return work(*take())

    outs = []
    for _ in range(2):
        inputs = take()
        out = work(*inputs)
        outs.append((out, [i for i in inputs if i.requires_grad], torch.randn_like(out)))
    every = itertools.cycle(outs)

    def backward() -> object:
        out, inputs, gradient = next(every)
        return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    return clock(forward), clock(backward)


def attentions(clock: Clock, dtype: torch.dtype) -> list[list[float]]:
    """[length, head_dim, sequences x heads, forward s, backward s] of causal attention."""
    found = []
    large = clock.device.type == "cuda"
    for length, head, heads in ((512, 64, 64), (2048, 128, 64), (8192, 128, 16)) if large else (
        (64, 64, 32), (128, 32, 32), (256, 64, 16), (256, 128, 8), (512, 32, 8), (512, 64, 8), (1024, 64, 4),
    ):  # fmt: skip
        q, k, v = (many(clock.device, dtype, 1, heads, length, head, count=2, grad=True) for _ in range(3))
        forward, backward = with_backward(clock, turns(q, k, v), lambda q, k, v: attend(q, k, v, "flash"))
        found.append([length, head, heads, forward, backward])
    return found


def memory_bound(clock: Clock, dtype: torch.dtype) -> dict[str, list[float]]:
    """{kind of row: [elements of its output, forward s, backward s]} of what runs beside the products; keys as in ``kernels.toml`` [passes]."""
    device = clock.device
    tokens, width, head = (8192, 4096, 128) if device.type == "cuda" else (1024, 768, 64)
    x = many(device, dtype, 1, tokens, width, grad=True)
    y = many(device, dtype, 1, tokens, width, grad=True)
    w, b = (torch.ones(width, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    rms = RMSNorm(width, 1e-6, device=device, dtype=dtype)
    torch.nn.init.ones_(rms.weight)
    angles = torch.randn(1, tokens, 1, head, device=device)
    tables = (angles.cos(), angles.sin())
    one, two = turns(x), turns(x, y)
    rows: dict[str, tuple[Callable[[], list[torch.Tensor]], Callable[..., torch.Tensor]]] = {
        "norm": (lambda: [*one(), w, b], lambda x, w, b: F.layer_norm(x, (width,), w, b)),
        "rms": (lambda: [*one(), rms.weight], lambda x, _: rms(x)),
        "activation": (one, ACTIVATIONS["gelu-tanh"]),
        "multiply": (two, lambda x, y: x * y),
        "gated": (two, lambda x, y: F.silu(x) * y),
        "add": (two, lambda x, y: x + y),
        "rope": (one, lambda x: rotate(x, head, tables, Numbers(1e-5))),
    }
    found = {name: [float(tokens * width), *with_backward(clock, take, work)] for name, (take, work) in rows.items()}
    table = torch.randn(8192, width, device=device, dtype=dtype, requires_grad=True)
    ids = [torch.randint(0, 8192, (1, tokens), device=device) for _ in range(2)]
    found["embedding"] = [float(tokens * width), *with_backward(clock, lambda: [table, ids[0]], lambda t, i: F.embedding(i, t))]
    found["bias"] = [float(tokens * width), 0.0, clock(lambda: x[0].detach().sum((0, 1)))]
    found["cast"] = [
        float(tokens * width),
        clock(lambda: x[0].detach().float().to(dtype) if dtype != torch.float32 else x[0].detach().clone()),
        0.0,
    ]
    return found


def loss(clock: Clock, dtype: torch.dtype) -> list[float]:
    """[logits, seconds] of the summed cross-entropy and its gradient."""
    tokens, vocabulary = (8192, 32000) if clock.device.type == "cuda" else (512, 8192)
    logits = many(clock.device, dtype, tokens, vocabulary, count=2, grad=True)
    labels = torch.randint(0, vocabulary, (tokens,), device=clock.device)
    forward, backward = with_backward(clock, turns(logits), lambda x: F.cross_entropy(x.float(), labels, reduction="sum"))
    return [float(tokens * vocabulary), forward + backward]


def optimizer(clock: Clock) -> dict[str, float]:
    """Seconds of fused AdamW on fp32 parameters, and of the gradients' norm and scaling."""
    shapes = [(4096, 4096)] * 16 if clock.device.type == "cuda" else [(512, 2048)] * 4 + [(512, 512)] * 8
    weights = [torch.randn(*s, device=clock.device, requires_grad=True) for s in shapes]
    for p in weights:
        p.grad = torch.randn_like(p)
    adam = torch.optim.AdamW(weights, lr=1e-5, fused=True)
    adam.step()
    grads = [p.grad for p in weights if p.grad is not None]

    def clip() -> None:
        torch.nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, 0.999)

    return {"parameters": float(sum(p.numel() for p in weights)), "step_s": clock(adam.step), "clip_s": clock(clip)}


def copies(clock: Clock) -> float:
    """Bytes/s read and written by a copy that no cache holds."""
    elements = 2**28 if clock.device.type == "cuda" else 2**24
    a, b = torch.zeros(elements, device=clock.device), torch.ones(elements, device=clock.device)
    return 8.0 * elements / clock(lambda: a.copy_(b))


def launch(clock: Clock) -> float:
    """Seconds of the host for one small operation, its gradient's half included: what a kernel costs that does next to nothing."""
    x, y = (torch.ones(8, device=clock.device, requires_grad=True) for _ in range(2))

    def chain() -> None:
        z = x
        for _ in range(8):
            z = z + y
        torch.autograd.grad(z, [x], torch.ones_like(z))

    return clock(chain) / 16


def call_of(kind: str, size: int, group: Any, members: list[int], device: torch.device) -> Callable[[], object]:
    """One collective of a whole message of `size` bytes as the wrappers of PyTorch call it."""
    n, me = len(members), dist.get_rank()
    elements = max(n, size // 4 // n * n)
    whole, part = torch.zeros(elements, device=device), torch.zeros(elements // n, device=device)
    other = torch.zeros_like(whole)
    if kind == "send_recv":
        first, last = members[0], members[-1]
        if me == first:
            return lambda: dist.send(whole, last, group=group)
        return (lambda: dist.recv(whole, first, group=group)) if me == last else (lambda: None)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, members[0], group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    return calls[kind]


def collectives(clock: Clock, ranks: int, largest: int) -> list[list[Any]]:
    """[kind, ranks, bytes, seconds]: the slowest rank's mean of the faster half of the calls, each begun together."""
    device = clock.device
    found: list[list[Any]] = []
    for n in sorted({2, ranks, *(2**i for i in range(1, ranks.bit_length()) if 2**i <= ranks)}):
        members = list(range(n))
        group = dist.new_group(members)
        mine = dist.get_rank() in members
        for kind in KINDS:
            for size in (s for s in SIZES if s <= largest):
                taken = list(_timed(call_of(kind, size, group, members, device), group, clock, 12 if size < 2**22 else 6)) if mine else []
                half = sorted(taken)[: max(1, len(taken) // 2)]
                seconds = torch.tensor([sum(half) / max(len(half), 1)], dtype=torch.float64)
                if mine:
                    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group) if device.type == "cpu" else None
                found.append([kind, n, max(n, size // 4 // n * n) * 4, float(seconds)])
        dist.barrier()
    return found


def _timed(call: Callable[[], object], group: Any, clock: Clock, repeats: int) -> Iterator[float]:
    device = clock.device
    for i in range(repeats + 1):
        share = clock.share()
        dist.barrier(group=group)
        if device.type == "cpu":
            measure_host.Cold.sweep()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i:
            yield (time.perf_counter() - start) * share


def overlap(clock: Clock, ranks: int) -> dict[str, float]:
    """Seconds of products alone, of an all-reduce alone, and of both at once."""
    if ranks == 1:
        return {}
    device = clock.device
    size = 2048 if device.type == "cuda" else 384
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    part = torch.zeros((2**18 if device.type == "cpu" else 2**24), device=device)
    whole = torch.zeros(ranks * part.numel(), device=device)

    def work(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b)

    def sends(count: int, products: int) -> None:
        """As FSDP runs: each gather is started before the products of the layer before, and waited for after them."""
        for _ in range(count):
            handle = dist.all_gather_into_tensor(whole, part, async_op=True)
            work(products)
            if handle is not None:
                handle.wait()

    def timed(call: Callable[[], object]) -> float:
        taken = sorted(_timed(call, None, clock, 8))
        total = torch.tensor([sum(taken[:4]) / 4], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / ranks

    sent = timed(lambda: sends(8, 0))
    once = timed(lambda: work(8)) / 8
    products = max(1, round(1.5 * sent / 8 / once))
    return {"work_s": timed(lambda: work(8 * products)), "sent_s": sent, "both_s": timed(lambda: sends(8, products))}


def measure(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    """All of it; `request`: device, dtypes, thorough."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if request["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    clock = Clock(device, 0.02 if request["thorough"] else 0.006, 8 if request["thorough"] else 4)
    with joined(folder, "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo") as (_, ranks):
        found: dict[str, Any] = {"device": _device(device, ranks, threads), "launch_s": launch(clock)}
        found["copy_bytes_per_s"] = copies(clock)
        for name, work in (("matmul", products), ("attention", attentions), ("elementwise", memory_bound), ("loss", loss)):
            found[name] = {}
            for dtype in request["dtypes"]:
                dist.barrier()
                found[name][dtype] = work(clock, DTYPES[dtype])
        dist.barrier()
        found["optimizer"] = optimizer(clock)
        found["collectives"] = collectives(clock, ranks, 2**24 if device.type == "cpu" else 2**28) if ranks > 1 else []
        found["overlap"] = overlap(clock, ranks)
        found["host"] = measure_host.measure(ranks) | {"pulse_s": clock.fastest} if device.type == "cpu" else {}
    return found


def _device(device: torch.device, ranks: int, threads: int) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": device.type, "ranks": ranks, "threads": threads, "software": f"torch {torch.__version__}"}
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return found | {"name": torch.cuda.get_device_name(device), "memory_bytes": total}
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return found | {"name": _processor(), "memory_bytes": total // ranks}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), "CPU")
    except OSError:
        return "CPU"


if __name__ == "__main__":
    sys.exit(answer(measure))
