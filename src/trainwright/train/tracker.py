"""Live tensor storages of a PyTorch program, and the bytes that its collectives carry, seen from a dispatch mode.

A storage counts from the operation that returned it until its last reference goes (weakref), resizes
included (FSDP2 frees by resizing to zero). DTensor's sharding propagation runs operations on meta copies of the global tensors: these are left out.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._sharding_prop as sharding_prop
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHAPES_ONLY = ("_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached")


class Tracker(TorchDispatchMode):
    """`current` and `peak` in bytes; `phase` and `weight` are written by the program; `messages` by (axis, collective, dtype, phase)."""

    def __init__(self, trace: bool = False) -> None:
        super().__init__()
        self.live: dict[int, tuple[int, str, tuple[int, ...], str]] = {}
        self.current = self.peak = 0
        self.phase = self.peak_phase = self.peak_op = ""
        self.peaks: dict[str, int] = {}
        self.at_peak: dict[int, tuple[int, str, tuple[int, ...], str]] = {}
        self.events: list[str] | None = [] if trace else None
        self.axes: dict[str, tuple[str, int]] = {}
        self.messages: dict[tuple[str, str, int, str, str], list[int]] = collections.defaultdict(lambda: [0, 0])
        self.weight = 1  # how many messages each one stands for
        self._paused = 0
        self._undo: list[Callable[[], None]] = []

    def reset(self) -> None:
        self.peak, self.peaks = 0, {}
        self.messages.clear()
        if self.events is not None:
            self.events.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if not self._paused and func.namespace in ("c10d", "_c10d_functional"):
            self._message(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if not self._paused:
            name = func.__name__
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor):
                    self._track(t, name)
        return out

    def _track(self, t: torch.Tensor, name: str) -> None:
        if isinstance(t, DTensor):
            return self._track(t._local_tensor, name)
        if hasattr(t, "elem"):  # an asynchronous collective's result
            return self._track(t.elem, name)
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return None
        entry = (storage.nbytes(), name, tuple(t.shape), str(t.dtype)[6:])
        self.live[key] = entry
        weakref.finalize(storage, self._gone, key)
        self._add(entry)
        return None

    def _add(self, entry: tuple[int, str, tuple[int, ...], str]) -> None:
        self.current += entry[0]
        self._event("+", entry)
        if self.current > self.peaks.get(self.phase, 0):
            self.peaks[self.phase] = self.current
        if self.current > self.peak:
            self.peak, self.peak_phase, self.peak_op = self.current, self.phase, entry[1]
            if self.events is not None:
                self.at_peak = dict(self.live)

    def _gone(self, key: int) -> None:
        entry = self.live.pop(key, None)
        if entry is not None:
            self.current -= entry[0]
            self._event("-", entry)

    def _event(self, sign: str, entry: tuple[int, str, tuple[int, ...], str]) -> None:
        if self.events is not None and entry[0]:
            self.events.append(f"{sign} {entry[0]:12,d} {entry[1]:44s} {entry[2]!s:24s} {entry[3]:9s} {self.current:14,d} {self.phase}")

    def _resized(self, storage: Any, size: int) -> None:
        key = storage._cdata
        if key not in self.live:
            return
        before, _, shape, dtype = self.live[key]
        self.live[key] = (size, "resize", shape, dtype)
        if size > before:
            self._add((size - before, "resize", shape, dtype))
        elif size < before:
            self.current -= before - size
            self._event("-", (before - size, "resize", shape, dtype))

    # messages

    def message(self, axis: str, collective: str, size: int, dtype: str, payload: int) -> None:
        entry = self.messages[(axis, collective, size, dtype, self.phase)]
        entry[0] += self.weight
        entry[1] += payload * self.weight

    def _message(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func.__name__.split(".")[0].strip("_").removesuffix("_coalesced").removesuffix("_into_tensor").removesuffix("_tensor")
        kinds = {
            "allgather_base": "all_gather",
            "reduce_scatter_base": "reduce_scatter",
            "allreduce": "all_reduce",
            "broadcast": "broadcast",
            "all_gather": "all_gather",
            "reduce_scatter": "reduce_scatter",
            "all_reduce": "all_reduce",
            "all_to_all_single": "all_to_all",
            "alltoall_base": "all_to_all",
            "send": "send_recv",  # the other end receives the same
        }
        kind = kinds.get(name)
        if kind is None:
            return
        tensors = [t for t in tree_leaves(args[0]) if isinstance(t, torch.Tensor)]
        payload = sum(t.numel() * t.element_size() for t in tensors)
        if func.namespace == "c10d":
            group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
            group_name = group.group_name
            if name in ("reduce_scatter_base", "alltoall_base"):
                payload = args[1].numel() * args[1].element_size()
        else:
            group_name = args[-1]
        axis, size = self.axes.get(group_name, ("world", 0))
        if func.namespace != "c10d" and kind == "all_gather":
            payload *= size
        self.message(axis, kind, size, str(tensors[0].dtype)[6:], payload)

    # patches

    def __enter__(self) -> Tracker:
        original = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            out = original(storage, size)
            self._resized(storage, size)
            return out

        torch.UntypedStorage.resize_ = resize_
        self._undo = [lambda: setattr(torch.UntypedStorage, "resize_", original)]
        for name in SHAPES_ONLY:
            if hasattr(sharding_prop.ShardingPropagator, name):
                self._pause_in(sharding_prop.ShardingPropagator, name)
        return super().__enter__()

    def _pause_in(self, cls: type, name: str) -> None:
        function = getattr(cls, name)

        def paused(*args: Any, **kwargs: Any) -> Any:
            self._paused += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._paused -= 1

        setattr(cls, name, paused)
        self._undo.append(lambda: setattr(cls, name, function))

    def __exit__(self, *args: Any) -> None:
        for undo in self._undo:
            undo()
        super().__exit__(*args)


def storages(tensors: Any) -> int:
    """Bytes of the distinct local storages of tensors."""
    seen: dict[int, int] = {}
    for t in tree_leaves(tensors):
        if isinstance(t, torch.Tensor):
            local = t._local_tensor if isinstance(t, DTensor) else t
            s = local.untyped_storage()
            seen[s._cdata] = s.nbytes()
    return sum(seen.values())
