"""Which checkpoints of a run are whole: their names, their manifest, the checksums of their pieces. Needs no torch; loading checks the same."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import TrainwrightError

FORMAT = "trainwright checkpoint 1"
MANIFEST = "manifest.json"
LATEST = "latest"
STEP = re.compile(r"step-(\d{8,})$")
READ_BYTES = 8 * 10**9  # of a larger checkpoint only the manifest and the files' sizes are compared where nobody wants its tensors


class Damaged(TrainwrightError):
    """A checkpoint is truncated, changed or incomplete; ``str()`` names the file and what is wrong with it."""


def step_folders(folder: Path) -> list[Path]:
    """Whole checkpoints by name: the one that ``latest`` names first, then the others, newest first."""
    found = sorted((p for p in folder.glob("step-*") if STEP.match(p.name) and p.is_dir()), reverse=True)
    marker = folder / LATEST
    named = marker.read_text().strip() if marker.is_file() else ""
    return sorted(found, key=lambda p: p.name != named)  # stable: False comes first


def step_of(folder: Path) -> int:
    match = STEP.match(folder.name)
    return int(match[1]) if match else -1


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises `Damaged` where it, or a file it names, is missing, cut or changed; tensors are not read."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror or error}") from None
    try:
        outer = json.loads(data)
        body = data[data.index(b'"body":') + 7 : data.rindex(b"}")]
        if zlib.crc32(body) != outer["crc32"]:
            raise ValueError
        found: dict[str, Any] = outer["body"]
        if found["format"] != FORMAT:
            raise Damaged(f"{path}: {str(found['format'])[:60]!r}, not {FORMAT!r}")
        files = {str(name): int(size) for name, size in found["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{path}: damaged") from None
    for name, size in files.items():
        file = folder / name
        there = file.stat().st_size if file.is_file() else None
        if there != size:
            raise Damaged(f"{file}: {'is missing' if there is None else f'{there:,} of {size:,} bytes'}")
    return found


def read_bytes(folder: Path, place: Mapping[str, Any]) -> bytearray:
    """One chunk of one tensor, its checksum compared."""
    path = folder / place["file"]
    data = bytearray(place["bytes"])
    try:
        with path.open("rb") as f:
            f.seek(place["at"])
            count = f.readinto(data)
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror or error}") from None
    if count != len(data) or zlib.crc32(data) != place["crc32"]:
        raise Damaged(f"{path}: damaged between bytes {place['at']:,} and {place['at'] + place['bytes']:,}")
    return data


def check(folder: Path) -> None:
    """Raises `Damaged` where loading the checkpoint would."""
    manifest = read_manifest(folder)
    pieces = [place for about in manifest["tensors"].values() for place in about["chunks"]]
    if sum(place["bytes"] for place in pieces) <= READ_BYTES:
        for place in pieces:
            read_bytes(folder, place)


def latest_step(folder: Path) -> int | None:
    """The step of the checkpoint among `folder` that a run would go on from; None where none is whole."""
    for found in step_folders(folder):
        try:
            check(found)
        except Damaged:
            continue
        return step_of(found)
    return None
