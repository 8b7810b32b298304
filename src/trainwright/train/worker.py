"""One rank of a run: ``python -m trainwright.train.worker RUN_DIR`` under torchrun.

Under `trainwright train` it prints nothing: what it has to say stands in the run's folder. Started by torchrun directly, rank 0 prints the same lines.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from ..errors import SpecError, TrainwrightError, one_line
from .files import OUTCOME, read_errors, read_run, write_error, write_json

LAUNCHED = "TRAINWRIGHT_LAUNCHED"
LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|gloo connect|nccl|socket|store.*(closed|fail)|CUDA error|peer|recv|TCPStore",
    re.IGNORECASE,
)


def main(arguments: list[str]) -> int:
    """Exit status 0: ended as asked, or for a reason that a restart would not mend (under a launcher, which reads it from the folder)."""
    if len(arguments) != 1:
        print("usage: torchrun ... -m trainwright.train.worker RUN_DIR", file=sys.stderr)
        return 2
    folder, launched = Path(arguments[0]), LAUNCHED in os.environ
    rank, attempt = int(os.environ.get("RANK", "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if launched:
        from .parent import die_with_parent

        die_with_parent()
        if any(e["final"] for e in read_errors(folder)):
            return 0  # torchrun starts again whatever ended; there is nothing to mend
    try:
        outcome = work(folder, rank, attempt)
        if rank == 0:
            write_json(folder / OUTCOME, vars(outcome))
            if not launched:
                print(f"{outcome.status} after step {outcome.step}, loss {outcome.loss}", file=sys.stderr)
        return 0
    except TrainwrightError as error:
        message, final, status = str(error), True, 2 if isinstance(error, SpecError) else 1
    except Exception as error:
        traceback.print_exc()
        lost = bool(LOST.search(str(error)))
        message, final, status = one_line(f"{type(error).__name__}: {error}", 400), not lost, 1
        if lost:
            message = f"the connection to another rank was lost ({message})"
    finally:
        sys.stdout.flush()
    write_error(folder, rank, attempt, message, final=final, status=status)
    if not launched and (rank == 0 or not final):
        print(f"trainwright: {message}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(0 if launched and final else status)  # a thread that waits for a peer must not hold the process


def work(folder: Path, rank: int, attempt: int) -> Any:
    """The run of this rank, from its file to its `Outcome`."""
    from .hang import record_collectives

    record_collectives()
    from .session import session

    with session(folder, read_run(folder), rank, attempt) as run:
        return run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
