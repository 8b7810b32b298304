"""How many plans a second the screen of time prices, traffic included: llama-3.1-405b on 16,384 H100, every degree of a wide table.

    python benchmarks/bench_screen.py [PLANS]

Best of five, CPU seconds of one thread.
"""

from __future__ import annotations

import itertools
import sys
import time

import numpy as np

from trainwright.cost.step import exact, screen
from trainwright.cost.table import PlanTable
from trainwright.cost.traffic import traffic
from trainwright.resolve import resolve_task
from trainwright.spec.plan import Structure
from trainwright.spec.run import validate

BATCH = 16384
SPEC = {
    "model": "llama-3.1-405b",
    "cluster": "16384xH100",
    "training": {"seq_len": 8192, "global_batch_size": BATCH},
    "strategy": {"framework": "megatron"},
}


def table(plans: int) -> PlanTable:
    structures = [
        Structure(framework="megatron", sharding="zero1", sequence_parallel=True, schedule=s, recompute=r)
        for s in ("1f1b", "interleaved-1f1b")
        for r in ("none", "selective", "full")
    ]
    rows = []
    for i, s in enumerate(structures):
        chunks = (1,) if s.schedule == "1f1b" else (2, 3, 4, 6, 8)
        powers = [(1, 2, 4, 8, 16, 32)] * 2 + [(1, 2, 4, 8, 16)] * 2
        for (tp, pp, cp, micro), virtual, replicas in itertools.product(itertools.product(*powers), chunks, (1, 2, 4, 8)):
            dp = 16384 // (tp * pp * cp)
            steps = BATCH // (dp * micro)
            if dp >= replicas and pp * virtual <= 126 and steps and (virtual == 1 or (pp > 1 and steps % pp == 0)):
                rows.append((i, replicas, dp // replicas, tp, pp, cp, 1, 1, virtual, micro, steps))
    columns = np.array(sorted(rows * max(1, round(plans / len(rows))))).T.astype(np.int64)
    return PlanTable(tuple(structures), *columns)


def best(call, times: int = 5) -> float:  # type: ignore[no-untyped-def]
    found = []
    for _ in range(times):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def main() -> None:
    task = resolve_task(validate(SPEC))
    plans = table(int(sys.argv[1]) if len(sys.argv) > 1 else 60_000)
    messages = traffic(task.model, task.cluster, task.job, plans)
    send = best(lambda: traffic(task.model, task.cluster, task.job, plans))
    price = best(lambda: screen(task.model, task.cluster, task.job, plans, messages))
    few = plans.take(np.linspace(0, len(plans) - 1, 100).astype(np.intp))
    some = traffic(task.model, task.cluster, task.job, few)
    whole = best(lambda: exact(task.model, task.cluster, task.job, few, some), 2)
    n = len(plans)
    print(
        f"{n} plans: traffic {n / send:,.0f}/s, screen {n / price:,.0f}/s, both {n / (send + price):,.0f}/s; exact {1e3 * whole / 100:.2f} ms a plan"
    )


if __name__ == "__main__":
    main()
