"""What a cluster's own runs say about the step times predicted for it: one factor a GPU and framework, shrunk toward one.

Each residual log(measured / predicted) is a cluster's and software's common factor plus the noise of a run. With normal noise of `NOISE` and factors spread by
`SPREAD` around one, the posterior mean of the log factor from n runs is n x mean / (n + (NOISE / SPREAD)^2): one run moves it most of the way, none
leaves the prediction as it is. The median stands for the mean, so that one odd run moves nothing.

A factor is used only where runs that had no part in it bear it out: predicting each run with the factor of the others has to lower the error by two standard
errors. Where runs of one cluster scatter more than they lean, the factor stays one.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from ..errors import SpecError
from .compare import Comparison

# Repeats of one spec differ by 1.5 % (median) to 5 % (90th percentile); whole clusters and releases by 5 to 10 % (docs/validation.md).
NOISE, SPREAD = 0.04, 0.08
MAX_BYTES = 1_000_000


@dataclass(frozen=True)
class Factor:
    """Measured over predicted step time for one GPU and framework. `before` and `after` are mean errors on the runs it is made from."""

    gpu: str
    framework: str
    factor: float
    runs: int
    before: float
    after: float


@dataclass(frozen=True)
class Profile:
    """Factors of a cluster; a GPU and framework without runs keeps 1."""

    factors: tuple[Factor, ...] = ()

    def factor(self, gpu: str, framework: str) -> float:
        return next((f.factor for f in self.factors if (f.gpu, f.framework) == (gpu, framework)), 1.0)

    def to_toml(self) -> str:
        return tomli_w.dumps({"factor": [dict(vars(f)) for f in self.factors]})


def shrunk(residuals: Sequence[float]) -> float:
    """The log factor that n residuals log(measured / predicted) support: their median, drawn toward zero."""
    n = len(residuals)
    return statistics.median(residuals) * n / (n + (NOISE / SPREAD) ** 2)


def supported(residuals: Sequence[float]) -> bool:
    """Whether a factor lowers the errors of runs that it was not made from by two standard errors.

    One or two runs say nothing of their own scatter: `NOISE` stands for it.
    """
    n = len(residuals)
    if n < 3:
        return abs(statistics.median(residuals)) > 2 * NOISE / math.sqrt(n)
    others = [shrunk([*residuals[:i], *residuals[i + 1 :]]) for i in range(n)]
    gains = [abs(math.expm1(-r)) - abs(math.expm1(f - r)) for f, r in zip(others, residuals)]
    return statistics.fmean(gains) > 2 * statistics.stdev(gains) / math.sqrt(n)


def calibrate(rows: Sequence[Comparison]) -> Profile:
    """A profile from runs with a measured step time."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.record.step_s is not None:
            key = (row.estimate.cluster.gpu.id, row.estimate.plan.structure.framework)
            groups.setdefault(key, []).append(math.log(row.record.step_s / row.estimate.step_s))
    if not groups:
        raise SpecError("no run has a measured step time", "measured.step_s")
    return Profile(tuple(_factor(gpu, framework, r) for (gpu, framework), r in sorted(groups.items())))


def _factor(gpu: str, framework: str, residuals: Sequence[float]) -> Factor:
    factor = math.exp(shrunk(residuals)) if supported(residuals) else 1.0
    error = lambda f: sum(abs(f / math.exp(r) - 1) for r in residuals) / len(residuals)  # noqa: E731
    return Factor(gpu, framework, factor, len(residuals), error(1.0), error(factor))


def read_profile(path: str | Path) -> Profile:
    """A profile that `trainwright calibrate -o` wrote. Raises `SpecError` for anything else."""
    target = Path(path)
    if not target.is_file() or target.stat().st_size > MAX_BYTES:
        raise SpecError("is no profile", str(path))
    try:
        document = tomllib.loads(target.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"is no TOML: {error}", str(path)) from None
    rows = document.get("factor", [] if document.get("gpu") else None)  # a measured machine may have no factors
    if not isinstance(rows, list) or not all(isinstance(r, Mapping) for r in rows):
        raise SpecError("holds no [[factor]]", str(path))
    return Profile(tuple(_read_factor(r, f"{path}, factor {n}") for n, r in enumerate(rows, 1)))


def _read_factor(row: Mapping[str, object], where: str) -> Factor:
    gpu, framework, factor = row.get("gpu"), row.get("framework"), row.get("factor")
    if not isinstance(gpu, str) or not isinstance(framework, str):
        raise SpecError("needs gpu and framework", where)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0.1 <= factor <= 10:
        raise SpecError(f"{str(factor)[:40]!r} is not between 0.1 and 10", f"{where}.factor")
    runs, before, after = (row.get(k, 0) for k in ("runs", "before", "after"))
    number = lambda v: float(v) if isinstance(v, (int, float)) else 0.0  # noqa: E731
    return Factor(gpu, framework, float(factor), int(number(runs)), number(before), number(after))
