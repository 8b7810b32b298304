"""A measured run: its run spec and what was measured of one optimizer step."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SpecError

PEAK_KINDS = ("allocated", "active", "reserved", "device")
MAX_BYTES, MAX_ROWS = 50_000_000, 100_000


@dataclass(frozen=True)
class RunRecord:
    """`step_s` seconds of one optimizer step; `peak_bytes` of the fullest GPU in the sense of `peak_kind`. None = not measured."""

    id: str
    spec: Mapping[str, Any]
    step_s: float | None = None
    peak_bytes: float | None = None
    peak_kind: str = "allocated"
    source: str = ""
    group: str = ""


def read_records(path: str | Path) -> list[RunRecord]:
    """Records of a ``.jsonl`` file (spec and measured as tables) or a ``.csv`` file (dotted columns: ``strategy.tp``, ``measured.step_s``)."""
    target = Path(path)
    if not target.is_file():
        raise SpecError("is no file of runs", str(path))
    if target.stat().st_size > MAX_BYTES:
        raise SpecError(f"is larger than {MAX_BYTES:,} bytes", str(path))
    try:
        text = target.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise SpecError("is not text (UTF-8)", str(path)) from None
    rows = _csv_rows(text, str(path)) if target.suffix.lower() == ".csv" else _json_rows(text, str(path))
    records = [_record(row, f"{path}, row {n}") for n, row in enumerate(rows, 1)]
    if not records:
        raise SpecError("holds no runs", str(path))
    return records


def _json_rows(text: str, where: str) -> Iterable[dict[str, Any]]:
    for n, line in enumerate(text.splitlines(), 1):
        if n > MAX_ROWS:
            raise SpecError(f"holds more than {MAX_ROWS:,} runs", where)
        if line.strip():
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                raise SpecError("is no JSON", f"{where}, line {n}") from None
            if not isinstance(row, dict):
                raise SpecError("is no table", f"{where}, line {n}")
            yield row


def _csv_rows(text: str, where: str) -> Iterable[dict[str, Any]]:
    reader = csv.DictReader(text.splitlines())
    if not reader.fieldnames or "model" not in reader.fieldnames:
        raise SpecError("has no column model", where, ["model, cluster, training.seq_len, strategy.tp, measured.step_s"])
    for n, flat in enumerate(reader, 1):
        if n > MAX_ROWS:
            raise SpecError(f"holds more than {MAX_ROWS:,} runs", where)
        row: dict[str, Any] = {"spec": {}}
        for key, value in flat.items():
            if key is None or value is None or not value.strip():
                continue
            section, _, name = key.strip().partition(".")
            if section in ("id", "source", "group"):
                row[section] = value.strip()
            else:
                place = row if section == "measured" else row["spec"]
                _nest(place, section, name, _literal(value.strip()))
        yield row


def _nest(place: dict[str, Any], section: str, name: str, value: Any) -> None:
    if not name:
        place[section] = value
        return
    inner = place.setdefault(section, {})
    if isinstance(inner, dict):
        inner[name] = value


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _record(row: Mapping[str, Any], where: str) -> RunRecord:
    measured, spec = row.get("measured"), row.get("spec")
    if not isinstance(measured, Mapping) or not isinstance(spec, Mapping):
        raise SpecError("needs a spec and what was measured", where, ["measured.step_s", "measured.peak_bytes"])
    kind = measured.get("peak_kind") or "allocated"
    if kind not in PEAK_KINDS:
        raise SpecError(f"{str(kind)[:40]!r} is no kind of peak", f"{where}, measured.peak_kind", PEAK_KINDS)
    values = {name: _positive(measured.get(name), f"{where}, measured.{name}") for name in ("step_s", "peak_bytes")}
    return RunRecord(
        str(row.get("id", where)), spec, values["step_s"], values["peak_bytes"], kind, str(row.get("source", "")), str(row.get("group", ""))
    )


def _positive(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e18:
        raise SpecError(f"{str(value)[:40]!r} is no positive number", where)
    return float(value)
