"""A report as text for people, annotations for GitHub, SARIF for code scanning, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import one_line
from .checks import CHECKS
from .findings import LABELS, Finding, Severity
from .read import UNKNOWN
from .run import Report

if TYPE_CHECKING:
    from .fix import Mended

FORMS = ("text", "github", "sarif", "json")
GITHUB: Mapping[Severity, str] = {Severity.ERROR: "error", Severity.BLOCKED: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
SARIF: Mapping[Severity, str] = {Severity.ERROR: "error", Severity.BLOCKED: "warning", Severity.WARNING: "warning", Severity.NOTE: "note"}


def text(report: Report, mended: Sequence[Mended] = ()) -> str:
    """One finding a paragraph: place, severity, check, what happens, what mends it. What was mended comes first, with the places it had before."""
    done = [_paragraph(f, "mended", f"{_changed(f, m.name)}.") for m in mended for f in m.applied]
    lines = [*done, f"{len(done)} mended; in the files as they are now:"] if mended else []
    lines += [_paragraph(f, LABELS[f.severity], f.mend) for f in report.findings]
    lines.append(summary(report))
    return "\n".join(lines) + "\n"


def _paragraph(finding: Finding, word: str, mend: str) -> str:
    """Names and values of a file may hold anything: none of it ends a line or reaches the terminal as a command."""
    head = one_line(f"{finding.place}: {word} {finding.check}: {finding.what}", 2000)
    return f"{head}\n    {one_line(mend, 2000)}" if mend else head


def _changed(finding: Finding, file: str) -> str:
    """``removed zero_optimization.offload_param, lr is now 0.001``."""
    said = []
    for c in finding.changes:
        key = ".".join(str(p) for p in c.path)
        if c.file == file:
            said.append(
                f"removed {key}" if c.remove else f"{key} is now {'called ' + c.rename if c.rename else json.dumps(c.value, default=str)}"
            )
    return ", ".join(said)


def summary(report: Report) -> str:
    """``2 files (deepspeed, trainer): 1 error, 2 warnings``."""
    readings = [r for r in report.setup.readings if r.document.parent is None]
    kinds = ", ".join(dict.fromkeys(r.format for r in report.setup.readings))
    counts = [(LABELS[s], sum(f.severity is s for f in report.findings)) for s in sorted(Severity, reverse=True)]
    said = ", ".join(f"{n} {word if n == 1 or ' ' in word else word + 's'}" for word, n in counts if n) or "nothing found"
    if all(r.format == UNKNOWN for r in report.setup.readings) and not report.findings:
        kinds, said = "of no known format", "nothing could be checked"
    return f"{len(readings)} file{'' if len(readings) == 1 else 's'} ({kinds}): {said}"


def github(report: Report) -> str:
    """Workflow commands that annotate the lines of a pull request."""
    return "".join(
        f"::{GITHUB[f.severity]} file={_property(f.place.file)},line={f.place.line or 1},title={f.check}::{_data(f'{f.what} {f.mend}'.strip())}\n"
        for f in report.findings
    )


def _data(message: str) -> str:
    kept = "".join(c for c in message if c.isprintable() or c in "\r\n")
    return kept.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _data(value).replace(":", "%3A").replace(",", "%2C")


def sarif(report: Report) -> dict[str, Any]:
    """SARIF 2.1.0, with fixes in words."""
    from .. import __version__

    used = sorted({f.check for f in report.findings})
    rules = [{"id": name, "name": name, "shortDescription": {"text": CHECKS[name].title}} for name in used]
    driver = {"name": "trainwright", "version": __version__, "informationUri": "https://pypi.org/project/trainwright", "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": [_result(f, used) for f in report.findings]}],
    }


def _result(finding: Finding, rules: list[str]) -> dict[str, Any]:
    location = {"artifactLocation": {"uri": finding.place.file}, "region": {"startLine": finding.place.line or 1}}
    return {
        "ruleId": finding.check,
        "ruleIndex": rules.index(finding.check),
        "level": SARIF[finding.severity],
        "message": {"text": f"{finding.what} {finding.mend}".strip()},
        "locations": [{"physicalLocation": location}],
    }


def render(report: Report, form: str, mended: Sequence[Mended] = ()) -> str:
    """The report in one of `FORMS`. `mended` are files that were written before the report was made: text and JSON say what was mended in them."""
    if form == "github":
        return github(report)
    if form == "text":
        return text(report, mended)
    if form == "sarif":
        return json.dumps(sarif(report), indent=2) + "\n"
    done = [f.to_dict() | {"changed": _changed(f, m.name)} for m in mended for f in m.applied]
    return json.dumps(report.to_dict() | ({"mended": done} if mended else {}), indent=2) + "\n"
