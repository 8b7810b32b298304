"""A checkpoint as a folder that transformers' ``from_pretrained`` reads, in one process, whatever layout it was saved from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import SpecError, TrainwrightError
from ..resolve import resolve
from ..spec.run import validate
from . import weights
from .checkpoint import export_model
from .decoder import build
from .files import CHECKPOINTS
from .parallelize import DTYPES
from .storage import whole_tensor
from .whole import MANIFEST, read_manifest, step_folders


@dataclass(frozen=True)
class Exported:
    """`step` the checkpoint was saved after; `parameters` and `bytes` of the tensors that were written."""

    folder: str
    step: int
    parameters: int
    bytes: int


def checkpoint_of(where: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest of a run's folder. Raises `SpecError`."""
    if (where / MANIFEST).is_file():
        return where
    for folder in (where / CHECKPOINTS, where):
        if found := step_folders(folder):
            return found[0]
    raise SpecError("holds no checkpoint" if where.is_dir() else "there is no such folder", str(where))


def check_target(target: Path) -> None:
    """Raises `SpecError` where a model is in the folder already, or nothing can be written."""
    if any((target / name).exists() for name in (weights.SINGLE, weights.INDEX, "config.json")):
        raise SpecError("holds a model already", str(target))
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"cannot be written: {error.strerror}", str(target)) from None


def export(where: Path, target: Path, dtype: str | None = None) -> Exported:
    """Writes `target` from a checkpoint or a run's folder; `dtype` None: weights as they are kept (fp32, where there are masters).

    A module of one's own is written under its own names. Raises `SpecError` for what is no checkpoint, `Damaged` for one that is not whole.
    """
    if dtype is not None and dtype not in DTYPES:
        raise SpecError(f"{dtype[:40]!r} is not a type of weights", "dtype", sorted(DTYPES))
    folder = checkpoint_of(where)
    manifest = read_manifest(folder)
    check_target(target)
    names = [n.removeprefix("model.") for n in manifest["tensors"] if n.startswith("model.")]
    sizes = {n: torch.Size(manifest["tensors"][f"model.{n}"]["shape"]).numel() for n in names}
    try:
        if (manifest.get("model") or {}).get("module"):
            written = export_model(folder, target / weights.SINGLE, {n: n.removeprefix("module.") for n in names})
        else:
            written = _own(folder, manifest, target, DTYPES[dtype] if dtype else None)
    except OSError as error:
        raise TrainwrightError(f"{target}: cannot be written: {error.strerror or error}") from None
    return Exported(str(target), int(manifest["step"]), sum(sizes.values()), written)


def _own(folder: Path, manifest: Mapping[str, Any], target: Path, dtype: torch.dtype | None) -> int:
    model = resolve(validate(manifest["spec"])).model
    with torch.device("meta"):
        expected = {n: p.shape for n, p in build(model).named_parameters()}
    tensors = {}
    for name, shape in expected.items():
        there = manifest["tensors"].get(f"model.{name}")
        if there is None or list(there["shape"]) != list(shape):
            raise SpecError(f"holds no {name} of shape {list(shape)}: it is of another model", str(folder))
        whole = whole_tensor(folder, manifest, f"model.{name}")
        tensors[name] = whole if dtype is None else whole.to(dtype)
    weights.save(model, tensors, target)
    return sum(t.nbytes for t in tensors.values())
