"""Where answers go: a rich console for people, JSON for programs, files by temporary name and rename."""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SpecError

if TYPE_CHECKING:
    from rich.console import Console


# What a terminal or file without Unicode (Latin-1, Windows' code pages, ASCII) gets in place of the fills of bars and timelines.
PLAIN = dict(zip("█▓▒░▚▞▙▜·", "#%=-x/&@."))


def prepare_streams() -> None:
    """Standard streams that every command can write to.

    What standard output cannot encode is written as plain characters (``?`` for any that has none) instead of stopping the command; a stream that is
    closed (``>&-``) swallows; a width of 0 columns means that nobody knows it.
    """

    def plain(error: UnicodeError) -> tuple[str | bytes, int]:
        assert isinstance(error, UnicodeEncodeError)
        character = error.object[error.start]
        if "\udc80" <= character <= "\udcff":  # a byte of a file's name that is no text
            return bytes([ord(character) - 0xDC00]), error.start + 1
        return PLAIN.get(character, "?"), error.start + 1

    codecs.register_error("trainwright-plain", plain)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="trainwright-plain")
    if os.environ.get("COLUMNS") == "0":
        del os.environ["COLUMNS"]


def console(stderr: bool = False) -> Console:
    """A console that colors only on a terminal; piped output is 120 columns wide unless COLUMNS says otherwise."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else 120
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def print_json(document: Any) -> None:
    """One JSON document on stdout, nothing else."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def print_rows(rows: Sequence[Mapping[str, Any]], form: str, title: str = "") -> None:
    """Rows of the same keys as ``table``, ``json``, ``csv`` or ``markdown``."""
    if form == "json":
        return print_json(list(rows))
    columns = list(rows[0]) if rows else []
    if form == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows([{k: "" if v is None else v for k, v in r.items()} for r in rows])
        sys.stdout.write(text.getvalue())
    elif form == "markdown":
        cells = [[_cell(r[c]).replace("|", "\\|") for c in columns] for r in rows]
        lines = [columns, ["---"] * len(columns), *cells]
        sys.stdout.write("".join(f"| {' | '.join(line)} |\n" for line in lines))
    else:
        from rich import box
        from rich.table import Table

        table = Table(title=title or None, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
        for c in columns:
            numeric = all(isinstance(r[c], (int, float, type(None))) for r in rows)
            table.add_column(c, justify="right" if numeric else "left", overflow="fold")
        for r in rows:
            table.add_row(*[_cell(r[c]) for c in columns])
        console().print(table)
    return None


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def table_format(json_: bool, csv_: bool, markdown: bool) -> str:
    """The one form that was asked for; two at once is an error."""
    asked = [name for name, on in (("json", json_), ("csv", csv_), ("markdown", markdown)) if on]
    if len(asked) > 1:
        raise SpecError(f"{' and '.join('--' + a for a in asked)} cannot both be", "output")
    return asked[0] if asked else "table"


def require_name(output: str | None, what: str = "file") -> None:
    """Raises `SpecError` for ``-o ""``, which is not the same as leaving it out (None)."""
    if output is not None and not output.strip():
        raise SpecError(f"is empty: no {what}", "--output", [". for this one"] if what == "folder" else [])


def check_target(path: str | None, usual: str = "plan.toml") -> None:
    """Raises `SpecError` where `write_text` would, before an answer is made that could not be kept. None is no file; `usual` is what one would be called."""
    require_name(path)
    target = Path(path or "")
    if not path or (target.exists() and not target.is_file() and not target.is_dir() and os.access(target, os.W_OK)):
        return
    if target.exists() and not target.is_dir() and not os.access(target, os.W_OK):
        raise SpecError("cannot be written: no permission", str(target))
    if target.is_dir():
        raise SpecError("is a folder, a file is needed", str(target), [str(target / usual)])
    handle, temporary = _beside(target)
    os.close(handle)
    os.unlink(temporary)


def _beside(target: Path) -> tuple[int, str]:
    """A new temporary file in the folder of `target`."""
    if target.is_dir():
        raise SpecError("is a folder, a file is needed", str(target))
    target = Path(os.path.realpath(target))
    if not target.parent.is_dir():
        raise SpecError("the folder does not exist", str(target.parent))
    try:
        return tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except PermissionError:
        raise SpecError("cannot be written: no permission", str(target)) from None
    except OSError as error:
        raise SpecError(f"cannot be written: {error.strerror}", str(target)) from None


def wrote(path: str | Path, text: str) -> str:
    """`write_text`, and a sentence that says whether a file was there before."""
    before = Path(path).is_file()
    return f"{'replaced' if before else 'wrote'} {write_text(path, text)}"


def _mode(target: Path, like: str) -> int:
    for path in (target, Path(like)):
        if path.is_file():
            return path.stat().st_mode & 0o7777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def write_text(path: str | Path, text: str, like: str = "") -> Path:
    """Writes the whole file or nothing: to a temporary file beside it, then renamed over it. A link keeps pointing where it did, a file that was there
    its permissions, a new one has those of the file `like`; what is no regular file (a pipe, ``/dev/stdout``) is written into, never replaced."""
    target = Path(path)
    if target.exists() and not target.is_file() and not target.is_dir():
        try:
            with target.open("w", encoding="utf-8") as f:
                f.write(text)
        except OSError as error:
            raise SpecError(f"cannot be written: {error.strerror}", str(target)) from None
        return target
    handle, temporary = _beside(target)
    target = Path(os.path.realpath(target))
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
        os.chmod(temporary, _mode(target, like))
        os.replace(temporary, target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise SpecError(f"cannot be written: {error.strerror}", str(target)) from None
    return Path(path)


MOST_BYTES = 20_000_000  # of a configuration file


def read_bytes(name: str) -> bytes:
    """A file's bytes; its text is the reader's matter, its size and its being there are not."""
    if name == "-":
        return sys.stdin.buffer.read(MOST_BYTES + 1)
    path = Path(name)
    if path.is_dir():
        raise SpecError("is a folder, a file is needed", name[:200])
    try:
        with path.open("rb") as f:
            data = f.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot be read: {getattr(error, 'strerror', None) or error}", name[:200]) from None
    if len(data) > MOST_BYTES:
        raise SpecError(f"is larger than {MOST_BYTES:,} bytes: no configuration", name[:200])
    return data


def read_text(path: str, limit: int = 10_000_000) -> str:
    """The text of a file, or of standard input for ``-``; at most `limit` bytes of UTF-8."""
    if path == "-":
        data = sys.stdin.buffer.read(limit + 1)
    else:
        target = Path(path)
        if target.is_dir():
            raise SpecError("is a folder, a file is needed", path)
        try:
            with target.open("rb") as f:
                data = f.read(limit + 1)
        except OSError as error:
            raise SpecError(f"cannot be read: {error.strerror}", path) from None
    if len(data) > limit:
        raise SpecError(f"is larger than {limit:,} bytes", path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SpecError("is not text (UTF-8)", path) from None


def join(parts: Iterable[str]) -> str:
    return "; ".join(p for p in parts if p)
