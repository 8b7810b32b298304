"""Where torch.distributed.checkpoint puts tensors: one safetensors file a rank and one ``manifest.json``. Nothing is pickled, nothing is unpickled.

PyTorch's own file storage keeps its metadata as a pickle, which runs code when read; this one keeps numbers and names only. Every piece carries a CRC-32, so
that a flipped bit or a cut file is noticed before a tensor is used.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..errors import TrainwrightError
from .whole import FORMAT, MANIFEST, read_bytes, read_manifest

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def write_safetensors(
    file: BinaryIO, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Writes tensors (CPU) in the order given; returns each one's ``at``, ``bytes`` and ``crc32`` in the file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, t in tensors.items():
        size = t.numel() * t.element_size()
        header[name] = {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    file.write(len(head).to_bytes(8, "little") + head)
    at, places = 8 + len(head), []
    for t in tensors.values():
        data = raw_bytes(t.detach().contiguous())
        file.write(data)
        places.append({"at": at, "bytes": data.nbytes, "crc32": zlib.crc32(data)})
        at += data.nbytes
    return places


def sync_file(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Writer(StorageWriter):
    """Saves into `folder`; when every rank has written, the coordinator adds the manifest (with `about`) and calls `commit`."""

    def __init__(self, folder: Path, about: Mapping[str, Any], commit: Callable[[], None]) -> None:
        self.folder, self.about, self.commit = folder, about, commit

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Runs on the coordinator before any rank writes."""
        self.folder.mkdir(parents=True)
        return [SavePlan(p.items, f"rank-{n:05d}.safetensors", p.planner_data) for n, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors, items = {}, []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise TrainwrightError(f"{item.index.fqn} is no tensor: checkpoints hold tensors, and numbers in the manifest")
            data = planner.resolve_data(item)
            offsets = "" if item.index.offset is None else "@" + ",".join(map(str, item.index.offset))
            tensors[item.index.fqn + offsets] = data.detach().cpu().contiguous()
            items.append(item)
        file = plan.storage_data
        with (self.folder / file).open("wb") as f:
            places = write_safetensors(f, tensors)
            sync_file(f)
        results = [WriteResult(i.index, p["bytes"], {"file": file, **p}) for i, p in zip(items, places)]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Runs on the coordinator after the last rank has written."""
        places = {(r.index.fqn, tuple(r.index.offset or ())): r.storage_data for rank in results for r in rank}
        tensors = {}
        for name, about in metadata.state_dict_metadata.items():
            if not isinstance(about, TensorStorageMetadata):
                raise TrainwrightError(f"{name} is no tensor")
            chunks = []
            for c in about.chunks:
                place = places.get((name, tuple(c.offsets))) or places[name, ()]
                chunks.append({"offsets": list(c.offsets), "sizes": list(c.sizes), **place})
            tensors[name] = {"dtype": DTYPES[about.properties.dtype], "shape": list(about.size), "chunks": chunks}
        files = {p.name: p.stat().st_size for p in sorted(self.folder.iterdir())}
        with (self.folder / MANIFEST).open("wb") as f:
            body = json.dumps({"format": FORMAT, **self.about, "files": files, "tensors": tensors}).encode()
            f.write(b'{"crc32":%d,"body":' % zlib.crc32(body) + body + b"}\n")
            sync_file(f)
        sync_folder(self.folder)
        self.commit()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(StorageReader):
    """Loads what `Writer` saved, whatever the layout it was saved from. Raises `Damaged`, checking each piece that is read."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder) if manifest is None else manifest
        self.metadata = Metadata({}, storage_data={})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, TensorStorageMetadata] = {}
        places: dict[MetadataIndex, dict[str, Any]] = {}
        for name, about in self.manifest["tensors"].items():
            chunks = [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in about["chunks"]]
            tensors[name] = TensorStorageMetadata(TensorProperties(BY_NAME[about["dtype"]]), torch.Size(about["shape"]), chunks)
            places |= {MetadataIndex(name, c["offsets"]): {**c, "dtype": about["dtype"]} for c in about["chunks"]}
        return Metadata(dict(tensors), storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_place = sorted(plan.items, key=lambda i: (self._place(i)["file"], self._place(i)["at"]))
        last, piece = None, torch.empty(0)
        for item in by_place:
            place = self._place(item)
            if last is not place:
                last, piece = place, read_piece(self.folder, place)
            part = piece[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths))]
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, item: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.metadata.storage_data[item.storage_index]
        return found

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def read_piece(folder: Path, place: Mapping[str, Any]) -> torch.Tensor:
    """One chunk of one tensor, its checksum compared."""
    data = read_bytes(folder, place)
    dtype = BY_NAME[place["dtype"]]
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(place["sizes"])


def whole_tensor(folder: Path, manifest: Mapping[str, Any], name: str) -> torch.Tensor:
    """A tensor put together from all of its chunks, in one process."""
    about = manifest["tensors"][name]
    out = torch.empty(about["shape"], dtype=BY_NAME[about["dtype"]])
    for chunk in about["chunks"]:
        where = tuple(slice(o, o + n) for o, n in zip(chunk["offsets"], chunk["sizes"]))
        out[where] = read_piece(folder, {**chunk, "dtype": about["dtype"]})
    return out
