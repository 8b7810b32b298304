"""What PyTorch itself allocates and sends, to the byte: one rank of a fake world, no GPU, no data. `trainwright.train` does the measuring.

    python -m venv v && v/bin/pip install -c constraints.txt -e '.[train]'
    v/bin/python benchmarks/measure_memory.py specs.jsonl -o rows.jsonl      # one JSON object a line: {"id": ..., "spec": {...}}
    v/bin/python benchmarks/measure_memory.py rows.jsonl --check             # rows with "measured": prints every difference

Rows have the form of `tests/data/truth_memory_more.jsonl`; a spec says what it measures in full, nothing is filled in.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from trainwright.catalog.load import load_model
from trainwright.train.probe import measure


def config_of(model: str | dict[str, Any]) -> dict[str, Any]:
    """A table of config.json's keys; a catalogue id is read from the catalogue."""
    return dict(load_model(model).config) if isinstance(model, str) else model


def differences(measured: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Measured minus wanted, where they differ; messages by group and collective."""
    numbers = [k for k in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "saved_bytes", "peak_bytes") if wanted.get(k)]
    out: dict[str, Any] = {k: measured[k] - wanted[k] for k in numbers if measured[k] != wanted[k]}
    totals: list[dict[str, int]] = []
    for entries in (measured["communication"], wanted["communication"]):
        total: dict[str, int] = {}
        for e in entries:
            key = f"{e['group']} {e['collective']}"
            total[key] = total.get(key, 0) + e["payload_bytes"]
        totals.append(total)
    for key in {*totals[0], *totals[1]}:
        difference = totals[0].get(key, 0) - totals[1].get(key, 0)
        if abs(difference) > 8192:
            out[key] = difference
    return out


def options(doc: str | None) -> argparse.Namespace:
    """The command line of a script that measures rows of specs."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", type=Path)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--only", default="", help="rows whose id holds this text")
    parser.add_argument("--check", action="store_true", help="compare with the rows' own measured values")
    parser.add_argument("--real", action="store_true", help="real CPU tensors instead of fake ones: eager attention only")
    parser.add_argument("--trace", type=Path, help="write every allocation and free of the measured step")
    return parser.parse_args()


def main() -> None:
    args = options(__doc__)
    software = f"torch {torch.__version__}, transformers {transformers.__version__}"
    done = {json.loads(line)["id"] for line in args.out.read_text().splitlines()} if args.out and args.out.exists() else set()
    for line in args.specs.read_text().splitlines():
        row = json.loads(line)
        if args.only not in row["id"] or row["id"] in done:
            continue
        try:
            measured, tracker = measure(
                {**row["spec"], "model": config_of(row["spec"]["model"])}, args.trace is not None, fake=not args.real
            )
        except Exception as error:
            print(row["id"], "FAILED", "".join(traceback.format_exception(error)[-3:]), file=sys.stderr, flush=True)
            continue
        if args.trace:
            args.trace.write_text("\n".join(tracker.events or []) + "\n")
        if args.check:
            print(row["id"], differences(measured, row["measured"]) or "exact", flush=True)
        else:
            print(row["id"], measured["peak_bytes"], measured["peak_phase"], tracker.peak_op, flush=True)
        if args.out:
            new = {**row, "measured": measured, "date": date.today().isoformat(), "software": software}
            with args.out.open("a") as f:
                f.write(json.dumps(new) + "\n")


if __name__ == "__main__":
    main()
