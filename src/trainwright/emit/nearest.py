"""From a plan that a target cannot express to the nearest one that it can."""

from __future__ import annotations

import copy
from math import gcd
from typing import Any

from ..errors import SpecError
from ..frameworks import FRAMEWORKS
from ..resolve import Run, resolve
from ..spec.run import validate
from .base import Changes, Limit, Target, dig, get, put
from .fields import limits

SECTIONS = ("training", "strategy")
STAGES = ("none", "zero1", "zero2", "zero3")
ROUNDS = 40


def refused(run: Run, target: Target) -> list[Limit]:
    """Every limit of the target that the run breaks."""
    return [limit for limit in limits(target, run) if not limit.allows(run)]


def refuse(run: Run, target: Target) -> None:
    """Raises `SpecError` that names the first field the target cannot express and the nearest plan that it can."""
    broken = refused(run, target)
    if not broken:
        return
    first = broken[0]
    try:
        changes = differences(run, mended(run, target))
    except SpecError:
        changes = first.change(run)
    near = listed(changes)
    raise SpecError(why(run, target, first), first.field, near)


def why(run: Run, target: Target, limit: Limit) -> str:
    """``llama-3.1-8b: torchtitan has no flavor of this model``."""
    return f"{_show(run.model.name if limit.field == 'model' else get(run, limit.field))}: {target.title} {limit.why}"


def suited(run: Run, target: Target) -> tuple[Run, Changes]:
    """The run with what its spec leaves open as the target needs it, and those fields; as it is where what the spec says had to change."""
    said = run.spec.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    document, near = copy.deepcopy(said), run
    chosen: Changes = {}
    for _ in range(ROUNDS):
        broken = refused(near, target)
        if not broken:
            return near, chosen
        changes = broken[0].change(near)
        if not changes or any(dig(said, f) is not None for f in changes):
            break
        chosen |= changes
        for field, value in changes.items():
            put(document, field, value)
        try:
            near = resolve(validate(document))
        except SpecError:
            break
    return run, {}


def mended(run: Run, target: Target) -> Run:
    """The nearest plan that the target can express: each broken limit's change applied, what follows from it settled."""
    for _ in range(ROUNDS):
        broken = refused(run, target)
        if not broken:
            return run
        run = changed(run, broken[0].change(run))
    raise SpecError(f"no plan near this one can be expressed by {target.title}", refused(run, target)[0].field)


def differences(before: Run, after: Run) -> Changes:
    """Fields of the filled spec that the mended plan has otherwise, in the order of the spec."""
    found: Changes = {}
    for section in SECTIONS:
        old, new = before.filled[section], after.filled[section]
        found |= {f"{section}.{k}": new.get(k) for k in [*old, *(k for k in new if k not in old)] if old.get(k) != new.get(k)}
    for key, old, new in (
        ("cluster.gpu", before.filled["cluster"]["gpu"], after.filled["cluster"]["gpu"]),
        ("model", before.filled["model"], after.filled["model"]),
    ):
        if old != new:
            found = {key: new, **found}
    return found


def changed(run: Run, changes: Changes) -> Run:
    """The run with fields changed and what follows from them settled, resolved again."""
    document = copy.deepcopy(run.filled)
    for field, value in changes.items():
        put(document, field, value)
    if changes:
        settle(document, run)
    return resolve(validate(document))


def settle(document: dict[str, Any], run: Run) -> None:
    """What follows from changed degrees: data parallelism takes the GPUs that are left, the batch divides, a pipeline of one has no schedule."""
    s, t = document["strategy"], document["training"]
    framework = FRAMEWORKS[s["framework"]]
    if s["framework"] != run.plan.structure.framework:
        _suit_framework(document, framework, run.model.kv_heads)
    if s["pp"] == 1:
        s |= {"virtual_stages": 1, "schedule": "1f1b"}
        s.pop("layers_per_stage", None)
    if s["tp"] == 1:
        s |= {"sequence_parallel": False, "async_tp": False}
    if s["recompute"] != "full":
        s["recompute_every"] = 1
    if s["recompute"] != "selective":
        s.pop("recompute_modules", None)
    dp = run.cluster.gpus // (s["tp"] * s["pp"] * s["cp"])
    replicate = gcd(s["dp_replicate"], dp) if s["dp_replicate"] != s["dp"] else 1
    if s["sharding"] == "none":
        replicate = dp
    s |= {"dp": dp, "dp_replicate": replicate, "dp_shard": dp // replicate}
    batch, micro = t["global_batch_size"], s["micro_batch_size"]
    if batch % dp:
        batch = max(1, round(batch / dp)) * dp
    while (batch // dp) % micro:
        micro -= 1
    s["micro_batch_size"], t["global_batch_size"] = micro, batch


def _suit_framework(document: dict[str, Any], framework: Any, kv_heads: int) -> None:
    """Another engine: what the old one had and this one lacks takes this one's default."""
    s, t = document["strategy"], document["training"]
    if s["sharding"] not in framework.shardings:
        s["sharding"] = str(framework.defaults.get("sharding", framework.shardings[-1]))
    if s["schedule"] not in framework.schedules:
        s["schedule"] = "1f1b"
    if s["offload"] not in framework.offloads:
        s["offload"] = "none"
    for axis in ("tp", "pp", "cp", "ep"):
        if axis not in framework.axes:
            s[axis] = 1
    if not framework.replicates_kv_heads:
        s["tp"] = gcd(s["tp"], kv_heads)
    if s["pp"] > 1 and s["sharding"] in STAGES[framework.pipeline_zero_stage + 1 :]:
        s["sharding"] = STAGES[framework.pipeline_zero_stage]
    s["options"] = {}
    t["loss"] = str(framework.defaults.get("loss", "plain"))


def listed(changes: Changes) -> str:
    """``strategy.framework = megatron, strategy.tp = 2``."""
    return ", ".join(f"{k} = {_show(v)}" for k, v in changes.items())


def _show(found: Any) -> str:
    if found is None:
        return "unset"
    if isinstance(found, bool):
        return str(found).lower()
    text = str(found)
    return text if len(text) <= 60 else text[:57] + "..."
