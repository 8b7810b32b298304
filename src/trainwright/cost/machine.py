"""The constants of a machine that `trainwright calibrate` measured, in place of those of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec.cluster import GpuSpec
from ..spec.precision import activation_dtype
from .kernels import Constants


def constants_of(gpu: GpuSpec, precision: str, table: Constants) -> Constants:
    """`table` (``kernels.toml``) with what was measured of `gpu` laid over it; unchanged for a GPU that was not.

    ``passes`` and ``loss`` are measured by number format: how many times a row's tensor is read or written, as many as its time is worth at the measured
    bandwidth; bytes a logit likewise, and other ways to hold the loss keep their ratio to the plain one.
    """
    if gpu.measured is None:
        return table
    known = gpu.measured.kernels
    found: dict[str, Any] = {**table}
    for name in ("optimizer", "host", "overlap", "step"):
        found[name] = {**table[name], **known.get(name, {})}
    found["memory"] = {**table["memory"], "share": 1.0, **known.get("memory", {})}
    passes = by_format(known.get("passes", {}), precision)
    found["passes"] = {fusion: {**rows, **passes} for fusion, rows in table["passes"].items()}
    loss = by_format(known.get("loss", {}), precision)
    if "plain" in loss:
        ratio = loss["plain"] / table["loss"]["plain"]
        found["loss"] = {k: v * ratio if isinstance(v, float) else v for k, v in table["loss"].items()}
    return found


def by_format(tables: Mapping[str, Any], precision: str) -> Mapping[str, Any]:
    """The table of a number format; that of the widest measured one where it was not measured itself."""
    dtype = activation_dtype(precision)
    return next((tables[name] for name in (dtype, "fp32", "bf16", "fp16") if name in tables), {})
