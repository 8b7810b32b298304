"""Text <-> numbers: bytes, or a ``tokenizer.json`` read by the `tokenizers` library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...errors import SpecError, TrainwrightError, one_line

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]", "<|end|>")


class Tokenizer(Protocol):
    """`vocabulary` numbers, `end` the one that closes a document (None: there is none), `digest` names the tokenizer in caches."""

    vocabulary: int
    end: int | None
    digest: str

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes, and 256 as the end of a document (0 for a model of 256 numbers)."""

    def __init__(self, vocabulary: int = 257) -> None:
        if vocabulary < 256:
            raise SpecError(f"a vocabulary of {vocabulary} holds no bytes; without a tokenizer, text is read byte by byte", "model", [257])
        self.end: int | None = 256 if vocabulary > 256 else 0
        self.vocabulary = 257 if vocabulary > 256 else 256
        self.digest = f"bytes-{self.vocabulary}"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(t.encode(), np.uint8) for t in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if 0 <= t < 256 and t != self.end).decode(errors="replace")


class FileTokenizer:
    """A local ``tokenizer.json`` (Hugging Face's format), or the folder that holds one."""

    def __init__(self, path: str | Path) -> None:
        target = Path(path).expanduser()
        target = target / "tokenizer.json" if target.is_dir() else target
        if not target.is_file():
            raise SpecError("there is no such tokenizer.json", str(path))
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise TrainwrightError("a tokenizer.json needs the library tokenizers: pip install 'trainwright[train]'") from None
        try:
            data = target.read_bytes()
            self.inner: Any = Library.from_buffer(data)
        except OSError as error:
            raise SpecError(f"cannot be read: {error.strerror}", str(target)) from None
        except Exception as error:  # the library raises Exception itself
            raise SpecError(f"is no tokenizer.json: {one_line(error, 160)}", str(target)) from None
        self.vocabulary = 1 + max(self.inner.get_vocab(with_added_tokens=True).values(), default=-1)
        self.end = next((i for i in map(self.inner.token_to_id, END_NAMES) if i is not None), None)
        self.digest = hashlib.sha256(data).hexdigest()[:16]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(e.ids, np.uint32) for e in self.inner.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.inner.decode(list(tokens)))


def load_tokenizer(path: str | None, vocabulary: int) -> Tokenizer:
    """The tokenizer of a run whose model has `vocabulary` numbers; bytes where none is named. Raises `SpecError` where it has more than the model."""
    if not path or path == "bytes":
        return ByteTokenizer(vocabulary)
    found = FileTokenizer(path)
    if found.vocabulary > vocabulary:
        raise SpecError(f"has {found.vocabulary:,} tokens, the model's vocabulary {vocabulary:,}", path, ["the tokenizer of this model"])
    return found
