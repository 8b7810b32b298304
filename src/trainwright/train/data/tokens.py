"""A memory-mapped file of tokens and where its documents end.

Our own form is ``NAME.bin`` (little-endian uint16 or uint32, nothing else), ``NAME.ends`` (uint64: one past the last token of each document) and ``NAME.json``
(what they are). Read as well: a bare ``.bin`` of uint16 (nanoGPT's) or with llm.c's header, and a one-dimensional ``.npy`` of integers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import SpecError
from .sources import EMBEDDED, documents, files_of, kind_of
from .tokenizer import Tokenizer, load_tokenizer

FORMAT = "trainwright tokens 1"
LLM_C_MAGIC, LLM_C_HEADER = 20240520, 1024
BATCH_DOCUMENTS = 256
SCAN = 1 << 22


@dataclass(frozen=True)
class Tokens:
    """`values` maps the file; `ends` is None where nobody said where documents end and no token says it either (`end`)."""

    path: str
    values: np.ndarray
    ends: np.ndarray | None
    end: int | None
    digest: str

    def __len__(self) -> int:
        return len(self.values)

    def document_ends(self) -> np.ndarray:
        """One past the last token of each document, the last one included. int64 [documents]."""
        if self.ends is not None:
            found = np.asarray(self.ends, np.int64)
        elif self.end is not None:
            blocks = (np.flatnonzero(self.values[i : i + SCAN] == self.end) + i + 1 for i in range(0, len(self), SCAN))
            found = np.concatenate([*blocks, np.zeros(0, np.int64)])
        else:
            found = np.zeros(0, np.int64)
        return found if found.size and found[-1] == len(self) else np.append(found, len(self)).astype(np.int64)


def open_tokens(path: str | Path, vocabulary: int, end: int | None = None) -> Tokens:
    """Maps a token file of any readable form; every token is below `vocabulary`. Raises `SpecError` on what is truncated, empty or of another vocabulary."""
    target = Path(path)
    beside = target.with_suffix(".json")
    try:
        if target.suffix == ".npy":
            return _checked(Tokens(str(path), _npy(target), None, end, _digest_of(target)), vocabulary)
        if beside.is_file():
            return _own(target, json.loads(beside.read_text()), vocabulary)
        with target.open("rb") as f:
            start = f.read(12)
        head = np.frombuffer(start if len(start) == 12 else b"", "<i4")
        offset = LLM_C_HEADER if len(head) and head[0] == LLM_C_MAGIC else 0
        size = target.stat().st_size - offset
        if size % 2:
            raise SpecError(f"{size:,} bytes are no whole number of uint16 tokens: truncated?", str(path))
        if offset and size // 2 < int(head[2]):
            raise SpecError(f"is truncated: {size // 2:,} of {int(head[2]):,} tokens", str(path))
        values = np.memmap(target, "<u2", "r", offset=offset) if size > 0 else np.zeros(0, np.uint16)
    except OSError as error:
        raise SpecError(f"cannot be read: {error.strerror or error}", str(path)) from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise SpecError("does not describe a token file", str(beside)) from None
    return _checked(Tokens(str(path), values, None, end, _digest_of(target)), vocabulary)


def _npy(path: Path) -> np.ndarray:
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise SpecError(f"is no array of numbers: {' '.join(str(error).split())[:160]}", str(path)) from None
    if values.ndim != 1 or values.dtype.kind not in "ui":
        raise SpecError(f"is {values.dtype} of shape {values.shape}, tokens are one row of integers", str(path))
    return values


def _own(path: Path, about: Any, vocabulary: int) -> Tokens:
    if about.get("format") != FORMAT:
        raise SpecError(f"is {str(about.get('format'))[:40]!r}, not {FORMAT!r}", str(path.with_suffix(".json")))
    dtype = np.dtype({"uint16": "<u2", "uint32": "<u4"}[about["dtype"]])
    for file, one, count in ((path, dtype.itemsize, about["tokens"]), (path.with_suffix(".ends"), 8, about["documents"])):
        if file.stat().st_size != one * count:
            raise SpecError(f"is truncated or damaged: {file.stat().st_size:,} bytes, {one * count:,} expected", str(file))
    if about["largest"] >= vocabulary:
        raise SpecError(f"holds token {about['largest']:,}, the model's vocabulary ends at {vocabulary - 1:,}", str(path))
    if not about["tokens"]:
        raise SpecError("holds no token", str(path))
    ends = np.memmap(path.with_suffix(".ends"), "<u8", "r")
    return Tokens(str(path), np.memmap(path, dtype, "r"), ends, about["end"], about["digest"])


def _checked(tokens: Tokens, vocabulary: int) -> Tokens:
    """Every token is scanned once: a number beyond the vocabulary would be found by a kernel much later, without a name."""
    if not len(tokens):
        raise SpecError("holds no token", tokens.path)
    for start in range(0, len(tokens), SCAN):
        block = tokens.values[start : start + SCAN]
        low, high = int(block.min()), int(block.max())
        if low < 0 or high >= vocabulary:
            at = start + int(np.argmax((block < 0) | (block >= vocabulary)))
            raise SpecError(f"token {at:,} is {int(tokens.values[at]):,}, the model's vocabulary ends at {vocabulary - 1:,}", tokens.path)
    return tokens


def _digest_of(path: Path) -> str:
    """Size and both ends of a file: enough to notice that a resumed run reads other data."""
    size = path.stat().st_size
    with path.open("rb") as f:
        head = f.read(1 << 16)
        f.seek(max(0, size - (1 << 16)))
        return hashlib.sha256(b"%d" % size + head + f.read()).hexdigest()[:16]


def prepare(
    data: str, tokenizer: str | None, vocabulary: int, folder: Path, *, field: str = "text", progress: Callable[[int], None] | None = None
) -> Path:
    """The token file of a data source: itself where it holds tokens, else written into `folder` once and found again by its digest.

    Raises `SpecError` for whatever the source or the tokenizer has wrong; a half-written file is never left under its name.
    """
    if data != EMBEDDED:
        found = files_of(data)
        if len(found) == 1 and kind_of(found[0]) == "tokens":
            encoder = load_tokenizer(tokenizer, vocabulary) if tokenizer else None
            open_tokens(found[0], vocabulary, encoder.end if encoder else None)
            return found[0].resolve()
    encoder = load_tokenizer(tokenizer, vocabulary)
    digest = _source_digest(data, encoder, field)
    target = folder / f"tokens-{digest}.bin"
    if target.with_suffix(".json").is_file() and target.is_file():
        try:
            open_tokens(target, vocabulary)
            return target
        except SpecError:  # damaged since it was written: made again
            target.with_suffix(".json").unlink()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tokens(target, documents(data, field), encoder, data, digest, progress)
    except OSError as error:
        raise SpecError(f"cannot be written: {error.strerror or error}", str(error.filename or folder)) from None
    return target


def _source_digest(data: str, encoder: Tokenizer, field: str) -> str:
    seen = hashlib.sha256(f"{FORMAT} {encoder.digest} {field}".encode())
    for path in [] if data == EMBEDDED else files_of(data):
        stat = path.stat()
        seen.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    return seen.hexdigest()[:16]


def write_tokens(
    target: Path, texts: Iterable[str], encoder: Tokenizer, source: str, digest: str, progress: Callable[[int], None] | None = None
) -> None:
    """Writes ``target`` (.bin) and its two companions under temporary names and renames them, the description last."""
    dtype = np.dtype("<u2" if encoder.vocabulary <= 1 << 16 else "<u4")
    count, largest, ends = 0, 0, []
    temporary = {s: target.with_suffix(f"{s}.{os.getpid()}.tmp") for s in (".bin", ".ends", ".json")}
    try:
        with temporary[".bin"].open("wb") as f:
            for tokens in _encoded(texts, encoder):
                whole = tokens if encoder.end is None else np.append(tokens, encoder.end)
                largest = max(largest, int(whole.max()))
                f.write(whole.astype(dtype).tobytes())
                count += len(whole)
                ends.append(count)
                if progress is not None:
                    progress(count)
        if not count:
            raise SpecError("holds no text", source)
        temporary[".ends"].write_bytes(np.asarray(ends, "<u8").tobytes())
        about = {"format": FORMAT, "dtype": dtype.name, "tokens": count, "documents": len(ends), "largest": largest, "end": encoder.end}
        temporary[".json"].write_text(json.dumps({**about, "digest": digest, "source": source, "tokenizer": encoder.digest}) + "\n")
        for suffix, path in temporary.items():
            os.replace(path, target.with_suffix(suffix))
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def _encoded(texts: Iterable[str], encoder: Tokenizer) -> Iterator[np.ndarray]:
    waiting = iter(texts)
    while batch := list(islice(waiting, BATCH_DOCUMENTS)):
        yield from (t for t in encoder.encode(batch) if len(t))
