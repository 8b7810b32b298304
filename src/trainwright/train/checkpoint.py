"""Checkpoints that are whole or not there: written aside by all ranks while training goes on, renamed when the last rank is done, found again on any layout.

    RUN/checkpoints/step-00000040/   manifest.json, rank-00000.safetensors, ...
    RUN/checkpoints/latest           the name of the newest, renamed into place after the folder
    RUN/checkpoints/*.tmp            what a killed run left half written; removed at the next start

torch.distributed.checkpoint plans who writes and reads which shard; `storage` is where it puts them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ..errors import SpecError, TrainwrightError, one_line
from .storage import Reader, Writer, sync_folder, whole_tensor, write_safetensors
from .whole import LATEST, STEP, Damaged, read_manifest, step_folders


class CheckpointFailed(TrainwrightError):
    """A checkpoint could not be written; the ones before it are untouched."""


@dataclass(frozen=True)
class Loaded:
    """What was read: the optimizer step it was saved after, the caller's own numbers, and the newer checkpoints that were damaged (one line each)."""

    step: int
    extra: dict[str, Any]
    folder: Path
    skipped: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of one run, used by every rank alike. `group` is a process group of its own with a CPU backend (gloo); None: one process.

    `about` describes the run (model configuration, optimizer, layout); a checkpoint whose model differs is refused.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], *, keep: int = 3, group: dist.ProcessGroup | None = None) -> None:
        self.folder, self.about, self.keep, self.group = folder, dict(about), keep, group
        self.rank = dist.get_rank(group) if group is not None else 0
        pinned = torch.cuda.is_available()
        self.stager = DefaultStager(StagingOptions(pinned, False, pinned, False))
        self.running: Future[Any] | None = None
        self.running_step = -1
        self.last_step: int | None = None

    # --- writing

    def clean(self) -> None:
        """Removes what a killed run left half written, and makes the folder. Raises `CheckpointFailed` where nothing can be written."""
        trouble = ""
        if self.rank == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                for left in self.folder.glob("*.tmp"):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                probe = self.folder / f"probe-{os.getpid()}.tmp"
                probe.write_bytes(b"x")
                probe.unlink()
            except OSError as error:
                trouble = f"{self.folder}: {reason(error)}"
        if trouble := self._share(trouble):
            raise CheckpointFailed(f"checkpoints cannot be written: {trouble}")

    def save(self, step: int, state: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> None:
        """Copies `state` and writes it in the background; waits for the save before. Raises `CheckpointFailed` for that one."""
        self.wait()
        temporary = self.folder / f"step-{step:08d}.tmp"
        writer = Writer(temporary, {"step": step, "extra": dict(extra), **self.about}, lambda: self._commit(temporary))
        self.running_step = step
        if self.group is None:
            self.running = Future()
            try:
                with alone():
                    self.running.set_result(dcp.save(dict(state), storage_writer=writer, no_dist=True))
            except BaseException as error:
                self.running.set_exception(error)
        else:
            response = dcp.async_save(dict(state), storage_writer=writer, process_group=self.group, async_stager=self.stager)
            self.running = response if isinstance(response, Future) else response.upload_completion

    def failed(self) -> bool:
        """Whether the save in the background has ended in an error; does not wait."""
        return self.running is not None and self.running.done() and self.running.exception() is not None

    def wait(self) -> None:
        """Until the save in the background is whole. Raises `CheckpointFailed`."""
        if self.running is None:
            return
        running, self.running = self.running, None
        try:
            running.result()
            self.last_step = self.running_step
        except (CheckpointException, OSError, RuntimeError) as error:
            if self.rank == 0:
                shutil.rmtree(self.folder / f"step-{self.running_step:08d}.tmp", ignore_errors=True)
            raise CheckpointFailed(f"the checkpoint of step {self.running_step} cannot be written: {reason(error)}") from error

    def close(self) -> None:
        self.stager.close()

    def _commit(self, temporary: Path) -> None:
        """Rank 0, once every rank has written and synced its file."""
        target = temporary.with_suffix("")
        if target.exists():  # of a run that was set back
            aside = target.with_suffix(".old.tmp")
            os.rename(target, aside)
        os.rename(temporary, target)
        sync_folder(self.folder)
        write_atomically(self.folder / LATEST, target.name + "\n")
        for old in [*self._too_many(target), *self.folder.glob("*.old.tmp")]:
            gone = old if old.suffix == ".tmp" else old.with_suffix(".old.tmp")
            with contextlib.suppress(OSError):  # another try at the next save
                if gone != old:
                    os.rename(old, gone)
                shutil.rmtree(gone)

    def _too_many(self, newest: Path) -> list[Path]:
        """What is older than the last `keep`; checkpoints of steps beyond the newest are of a run that was set back."""
        older = [p for p in sorted(self.folder.glob("step-*"), reverse=True) if STEP.match(p.name) and p.name <= newest.name]
        return older[max(1, self.keep) :] if self.keep > 0 else []

    # --- reading

    def any(self) -> bool:
        """Whether rank 0 sees a checkpoint."""
        return bool(self._share(bool(step_folders(self.folder))))

    def load(self, state: dict[str, torch.Tensor], which: str | None = None) -> Loaded | None:
        """Fills `state` (tensors or DTensors, in place) from the newest whole checkpoint, or from the one that `which` names (a folder).

        None where there is none. A damaged one is passed over for the next older; where all are, or `which` is, `Damaged` is raised; a checkpoint of another
        model or optimizer raises `SpecError`.
        """
        candidates = [Path(which)] if which else step_folders(self.folder)
        names = self._share([str(p) for p in candidates])
        skipped: list[str] = []
        for folder in map(Path, names):
            trouble = None
            try:
                manifest = read_manifest(folder)
                self._same_model(manifest, state, folder)
            except TrainwrightError as error:
                trouble = error
            self._raise_first(trouble, skipped)
            if skipped and skipped[-1].startswith(str(folder)):
                continue
            try:
                with alone() if self.group is None else contextlib.nullcontext():
                    dcp.load(state, storage_reader=Reader(folder, manifest), process_group=self.group, no_dist=self.group is None)
            except (CheckpointException, Damaged) as error:
                skipped.append(damage(error))
                continue
            return Loaded(int(manifest["step"]), dict(manifest["extra"]), folder, tuple(skipped))
        if skipped:
            raise Damaged(f"no checkpoint is whole: {'; '.join(skipped)}")
        return None

    def _raise_first(self, trouble: TrainwrightError | None, skipped: list[str]) -> None:
        """All ranks agree on the first trouble any of them had: damage is noted, another model is raised."""
        told = None if trouble is None else (isinstance(trouble, Damaged), trouble.args and str(trouble))
        for each in self._gather(told):
            if each is not None:
                if not each[0]:
                    raise SpecError(each[1])
                skipped.append(each[1])
                return

    def _same_model(self, manifest: Mapping[str, Any], state: Mapping[str, torch.Tensor], folder: Path) -> None:
        there, here = manifest.get("model") or {}, self.about.get("model") or {}
        for key in sorted({*there, *here}):
            if there.get(key) != here.get(key):
                raise SpecError(
                    f"is a checkpoint of another model: {key} {show(there.get(key))} there, {show(here.get(key))} here", str(folder)
                )
        if manifest.get("optimizer") != self.about.get("optimizer"):
            raise SpecError(f"was made with the optimizer {manifest.get('optimizer')}, here {self.about.get('optimizer')}", str(folder))
        for name, tensor in state.items():
            saved = manifest["tensors"].get(name)
            if saved is None:
                raise SpecError(f"is a checkpoint of another model: it has no {name}", str(folder))
            if list(saved["shape"]) != list(tensor.shape):
                raise SpecError(
                    f"is a checkpoint of another model: {name} is {saved['shape']} there, {list(tensor.shape)} here", str(folder)
                )

    # --- between ranks

    def _share(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self.group)
        return box[0]

    def _gather(self, value: Any) -> list[Any]:
        if self.group is None:
            return [value]
        box: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(box, value, group=self.group)
        return box


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One process is meant: PyTorch need not warn that it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def show(value: Any) -> str:
    return "unset" if value is None else one_line(value, 60)


def causes(error: BaseException) -> Iterator[BaseException]:
    """The errors inside an error: what each rank of a collective checkpoint raised, first rank first."""
    if isinstance(error, CheckpointException):
        for _, wrapped in sorted(error.failures.items()):
            inner = wrapped[0] if isinstance(wrapped, tuple) else wrapped
            yield from causes(inner)
    else:
        yield error


def reason(error: BaseException) -> str:
    """Why, on one line: "No space left on device" rather than a traceback of every rank."""
    first = next(causes(error), error)
    if isinstance(first, OSError) and first.errno is not None:
        word = {errno.ENOSPC: "no space left on the disk", errno.EDQUOT: "the quota is used up", errno.EACCES: "no permission"}
        return word.get(first.errno, first.strerror or str(first)) + (f" ({first.filename})" if first.filename else "")
    return one_line(f"{type(first).__name__}: {first}" if not isinstance(first, TrainwrightError) else first, 300)


def damage(error: BaseException) -> str:
    found = [e for e in causes(error) if isinstance(e, Damaged)]
    return str(found[0]) if found else reason(error)


def export_model(folder: Path, target: Path, names: Mapping[str, str] | None = None, prefix: str = "model.") -> int:
    """One ``model.safetensors`` from a sharded checkpoint, in one process and without torch.distributed; returns the bytes written.

    `names` renames tensors (ours -> the file's); the `prefix` of the saved state is dropped. Raises `Damaged`.
    """
    manifest = read_manifest(folder)
    tensors = {}
    for full in manifest["tensors"]:
        if full.startswith(prefix):
            name = full.removeprefix(prefix)
            tensors[(names or {}).get(name, name)] = whole_tensor(folder, manifest, full)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".tmp")
    with temporary.open("wb") as f:
        places = write_safetensors(f, tensors, {"format": "pt"})
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, target)
    return sum(p["bytes"] for p in places)
