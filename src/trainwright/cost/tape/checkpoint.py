"""Activation checkpointing on the tape (``torch.utils.checkpoint``, non-reentrant): a region saves its arguments and runs again in
backward.

At the first unpack the region runs again and stops at its last saved tensor, so its last product never runs. Each recomputed tensor goes
when it is unpacked; the arguments go with the region's last node. An op-selective region (torchtitan) keeps the outputs of attention, of
reduce-scatters and of every second matrix product.
"""

from __future__ import annotations

from collections.abc import Callable

from .machine import Node, Run, Tensor


class _Stop(Exception):
    """The last saved tensor of a region is there again."""


class Handle:
    """What a node of a region saves instead of a tensor."""

    __slots__ = ("index", "region")

    def __init__(self, region: Region, index: int) -> None:
        self.region, self.index = region, index

    def unpack(self) -> Tensor:
        if self.index not in self.region.recomputed:
            self.region.run_again()
        return self.region.recomputed.pop(self.index)


class Cache:
    """Outputs that an op-selective checkpoint keeps: every second product in call order, all of the other kinds."""

    def __init__(self, kinds: frozenset[str]) -> None:
        self.kinds = kinds
        self.kept: dict[str, list[list[Tensor]]] = {}
        self.calls = 0
        self.replaying = False

    def outputs(self, kind: str, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        if kind == "mm":
            self.calls += 1
        if kind not in self.kinds or (kind == "mm" and self.calls % 2 == 0):
            return make()
        if self.replaying:
            return [t.view() for t in self.kept[kind].pop(0)]
        made = make()
        self.kept.setdefault(kind, []).append([t.view() for t in made])
        return made


class Region:
    """A function under a checkpoint and its arguments."""

    def __init__(self, run: Run, function: Callable[..., Tensor], args: list[Tensor], layer: int, cache: Cache | None) -> None:
        self.run, self.function, self.layer, self.cache = run, function, layer, cache
        self.args = [(t.view(), t.needs_grad) for t in args]
        self.count = 0
        self.recomputed: dict[int, Tensor] = {}

    def pack(self, t: Tensor) -> Handle:
        self.count += 1
        return Handle(self, self.count - 1)

    def run_again(self) -> None:
        r = self.run
        pack, caching, layer, copies, outer = r.pack, r.caching, r.layer, r.copies, r.recomputing
        seen = 0

        def keep(t: Tensor) -> Tensor:
            nonlocal seen
            self.recomputed[seen] = t
            seen += 1
            if seen == self.count:
                raise _Stop
            return t

        r.pack, r.layer, r.recomputing = keep, self.layer, True
        if self.cache is not None:
            self.cache.calls, self.cache.replaying = 0, True
        r.caching, r.copies = self.cache, copies if r.keeps_copies else {}  # its own autocast context
        leaf = Node(0, "argument", [], [], lambda r, saved, g: [], self.layer)
        try:
            self.function(*[Tensor(t.elements, t.dtype, t.storage, leaf if wanted else None) for t, wanted in self.args])
        except _Stop:
            pass
        finally:
            r.pack, r.caching, r.layer, r.copies, r.recomputing = pack, caching, layer, copies, outer


def checkpoint(r: Run, function: Callable[..., Tensor], args: list[Tensor], cache: Cache | None = None) -> Tensor:
    """Run `function` so that its nodes save handles; the arguments stay alive with the handles."""
    region = Region(r, function, args, r.layer, cache)
    pack, caching = r.pack, r.caching
    r.pack, r.caching = region.pack, cache
    try:
        return function(*args)
    finally:
        r.pack, r.caching = pack, caching


def selective_cache() -> Cache:
    """torchtitan's list: attention, reduce-scatter, every second ``mm`` (a biased ``addmm`` is none)."""
    return Cache(frozenset({"mm", "attention", "reduce_scatter"}))
