"""Files and a launch line in, findings out, most severe first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import expect, unknown
from .checks import CHECKS
from .findings import LABELS, Finding, Severity
from .read import read_setup
from .setup import Setup


@dataclass(frozen=True)
class Report:
    """What `check` answers: what was read, and what is wrong with it."""

    setup: Setup
    findings: tuple[Finding, ...]

    @property
    def has_errors(self) -> bool:
        return any(f.severity is Severity.ERROR for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """{"files": [{"file", "format", "partial"}], "findings": [...], "errors": n, "warnings": n}."""
        count = lambda s: sum(f.severity is s for f in self.findings)  # noqa: E731
        return {
            "files": [
                {"file": r.document.name, "format": r.format, "partial": r.fragment, "template": r.template} for r in self.setup.readings
            ],
            "findings": [f.to_dict() for f in self.findings],
            "counts": {LABELS[s]: count(s) for s in sorted(Severity, reverse=True)},
        }


def check(
    files: Mapping[str, str | bytes],
    launch: str = "",
    model: str | Mapping[str, Any] | None = None,
    on: str | Mapping[str, Any] | None = None,
    ignore: Iterable[str] = (),
) -> Report:
    """Reads `files` (name -> text) together with the launch line and runs every check but those named in `ignore`.

    `model` and `on` say what the files do not (a catalogue id, a config.json, a size; ``8xA100``). Raises `SpecError` where a name is unknown.
    """
    expect(Mapping, "a mapping of file names to texts", files=files)
    expect(str | bytes, "the text of a file", **{str(name): text for name, text in files.items()})
    expect(str, "a command", launch=launch)
    expect(str | Mapping, "a cluster", on="" if on is None else on)
    expect(Iterable, "a list of checks", ignore=ignore)
    asked = {k: v for k, v in (("model", model), ("on", on)) if v}
    _known_names(model, on)
    return judge(read_setup(dict(_records(files)), launch, asked), ignore)


def _known_names(model: str | Mapping[str, Any] | None, on: str | Mapping[str, Any] | None) -> None:
    """Raises `SpecError` for a model or a cluster that nobody knows: the caller's mistake, not the files'."""
    from ..catalog.load import build_cluster, load_model
    from ..spec.run import validate

    if model:
        load_model(model)
    if on:
        build_cluster(validate({"model": "7B", "cluster": on if isinstance(on, str) else dict(on)}).cluster)


def _records(files: Mapping[str, str | bytes]) -> Iterator[tuple[str, str | bytes]]:
    """The files; each line of a ``.jsonl`` is a file of its own, named by its number."""
    for name, raw in files.items():
        if not name.endswith(".jsonl"):
            yield name, raw
            continue
        text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
        yield from ((f"{name}:{n}", line) for n, line in enumerate(text.splitlines(), 1) if line.strip())


def judge(setup: Setup, ignore: Iterable[str] = ()) -> Report:
    """Every check on one setup. The order: severity, then file and line, then the check's number."""
    left_out = {_known(name) for name in ignore}
    found: dict[tuple[object, ...], Finding] = {}
    for name, entry in CHECKS.items():
        if name not in left_out:
            for f in entry.run(setup):
                found.setdefault((f.check, f.place, f.what), f)
    return Report(setup, tuple(sorted(found.values(), key=lambda f: (-f.severity, f.place.file, f.place.line or 0, f.check, f.what))))


def _known(name: str) -> str:
    try:
        return str(CHECKS[name].name)
    except KeyError:
        raise unknown("check", name, CHECKS, "--ignore") from None
