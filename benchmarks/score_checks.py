"""Scores `trainwright check` on real files that are not part of this project.

    python benchmarks/score_checks.py TABLE.csv FOLDER

TABLE has the columns id, path, label (good | faulty | unknown) and check; FOLDER/<id>/ holds the file of each row. Printed: the faulty files whose fault
was not named by the right check, the good ones with an error, and last one line with the shares and the times.
"""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path

from trainwright.check.findings import Severity
from trainwright.check.run import check


def main(table: str, folder: str) -> None:
    named = faulty = alarms = good = 0
    times: list[float] = []
    for row in csv.DictReader(Path(table).read_text(encoding="utf-8").splitlines()):
        files = sorted((Path(folder) / row["id"]).iterdir()) if (Path(folder) / row["id"]).is_dir() else []
        if not files:
            print(f"{row['id']}: no file")
            continue
        start = time.process_time()
        report = check({row["path"]: files[0].read_bytes()})
        times.append(time.process_time() - start)
        found = sorted({f.check for f in report.findings})
        if row["label"] == "faulty":
            faulty += 1
            named += row["check"] in found
            if row["check"] not in found:
                print(f"{row['id']} {row['path']}: {row['check']} is not among {', '.join(found) or 'nothing'}")
        elif row["label"] == "good":
            good += 1
            errors = [f for f in report.findings if f.severity is Severity.ERROR]
            alarms += bool(errors)
            for f in errors:
                print(f"{row['id']} {f.place}: {f.check} {f.what}")
    times.sort()
    print(
        f"faulty named {named}/{faulty} = {named / max(1, faulty):.1%}; good with an error {alarms}/{good}; "
        f"CPU seconds a file: median {times[len(times) // 2]:.3f}, worst {times[-1]:.3f}"
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
