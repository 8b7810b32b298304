"""The README of an emitted set: three lines first (install, run, expect), then the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..cost.estimate import evaluate
from ..cost.table import PlanTable
from ..units import format_bytes, format_seconds
from .base import Changes, Options, Target, get
from .environment import settings
from .fields import DEFAULTS, left
from .megatron_model import rope
from .nearest import listed

if TYPE_CHECKING:
    from ..cost.estimate import Estimate
    from ..resolve import Run


def expectation(run: Run) -> Estimate:
    """Memory and time of the run as it is emitted."""
    table = evaluate(run.model, run.cluster, run.job, PlanTable.from_plans([run.plan]))
    return table.row(0, run.filled, warnings=run.warnings, assumed=run.assumed)


OPEN = "Left open by the plan, chosen for"


def readme(run: Run, target: Target, options: Options, chosen: Changes) -> str:
    """Markdown. Nothing in it is needed by a program. `chosen` are fields that the plan left open and the target decided."""
    e = expectation(run)
    p = run.plan
    expect = (
        f"{format_seconds(e.step_s)} a step of {run.job.tokens_per_step:,} tokens, {e.tokens_per_s / p.gpus:,.0f} tokens/s per GPU (MFU {e.mfu:.1%}), "
        f"{format_bytes(e.device_bytes)} of {format_bytes(e.capacity_bytes)} on the fullest GPU"
    )
    title = f"{run.model.name} on {run.cluster.gpus} x {run.cluster.gpu.id}: {target.title}"
    lines = [
        f"1. Install: {target.install(run, options)}",
        f"2. Run: {target.command(run, options)}",
        f"3. Expect: {expect}{'' if e.fits else '. **It does not fit.**'}",
        "",
        f"# {' '.join(title.split())}",
        "",
        _layout(run),
        "",
        "Environment that the plan relies on (set by the files here):",
        "",
        *[f"- `{s.name}={s.value}`: {s.reason}." for s in settings(run, target, options)],
    ]
    undone = [f for f in left(target, run) if get(run, f) not in (None, DEFAULTS.get(f))]
    if undone:
        lines += ["", f"Of the plan, files of this kind do not hold the following; {options.script} has to do it:", ""]
        lines += [f"- `{f} = {get(run, f)}`" for f in undone]
    lines += ["", f"Not in the plan, chosen here: learning rate {options.learning_rate:g}, gradient norm clipped at {options.clip:g}."]
    lines += [f"\n{OPEN} {target.title}: {listed(chosen)}."] if chosen else []
    lines += [f"\nNote: {w}." for w in run.warnings]
    if (
        target.name == "megatron"
        and any(op.kind == "rope" for b in run.model.blocks.values() for op in b)
        and not rope(run.model.config).get("rope_theta")
    ):
        lines.append(
            "\nNote: the configuration names no rope_theta, so Megatron takes its own 10,000; add --rotary-base where the model was made with another."
        )
    lines += [f"\nNote: {w}." for w in _cut_between_experts(run, target)]
    lines += [
        "",
        f"After a change of the plan write the set again: `trainwright emit plan.toml --to {target.name} -o` this folder `--force`. Without `--force` "
        "no file that is here is replaced.",
    ]
    return "\n".join(lines) + "\n"


def _cut_between_experts(run: Run, target: Target) -> Iterator[str]:
    """What FSDP2 does by default, and Accelerate's and the Trainer's files cannot change, of which the plan knows nothing."""
    p, experts = run.plan, [op.experts for b in run.model.blocks.values() for op in b if op.kind == "grouped_linear"]
    fewest, sharded = min(experts, default=p.dp_shard), p.structure.sharding in ("zero2", "zero3")
    if target.name in ("accelerate", "trainer") and p.structure.framework == "fsdp2" and sharded and fewest < p.dp_shard:
        yield (
            f"FSDP2 cuts a stack of experts between them, and these files cannot say otherwise: of {p.dp_shard} shards {fewest} hold a whole expert of each "
            f"layer and the others none, where the plan counts equal shards; the set of `--to fsdp` cuts within them"
        )


def _layout(run: Run) -> str:
    p, s = run.plan, run.plan.structure
    axes = ", ".join(f"{n} {getattr(p, n)}" for n in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep") if getattr(p, n) > 1) or "one GPU"
    return (
        f"Layout: {axes}; {s.framework} {s.sharding}; micro-batch {p.micro_batch_size} x {p.accumulation} accumulated x {p.dp} replicas = "
        f"{run.job.global_batch_size} sequences of {run.job.seq_len:,}; recompute {s.recompute}; offload {s.offload}."
    )
