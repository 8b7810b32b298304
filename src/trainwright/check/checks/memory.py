"""K04, K35, K42: does it fit, on the GPUs and in the host's memory, and is it far slower than these GPUs are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import SpecError, TrainwrightError
from ...units import format_bytes
from ..findings import Check, Example, Finding, Severity
from ..setup import Fact, Place, Setup
from ..spec import to_spec
from ._tools import ERROR, NOTE, WARNING, first_place

if TYPE_CHECKING:
    from ...cost.estimate import Estimate


def estimated(setup: Setup) -> tuple[Estimate, list[str]] | None:
    """The estimate of the run that the files describe; None where they do not describe one, or one that cannot run (other checks say why)."""
    described = to_spec(setup)
    if described is None:
        return None
    try:
        return _estimate(described.document), list(described.assumed)
    except (SpecError, TrainwrightError):
        return None


def _estimate(document: dict[str, Any]) -> Estimate:
    from ...cost.estimate import evaluate
    from ...cost.table import PlanTable
    from ...resolve import resolve
    from ...search.constraints import check_plan
    from ...spec.run import validate

    run = resolve(validate(document))
    check_plan(run.model, run.cluster, run.job, run.plan)
    return evaluate(run.model, run.cluster, run.job, PlanTable.from_plans([run.plan])).row(0, run.filled, assumed=run.assumed)


def _cached(setup: Setup) -> tuple[Estimate, list[str]] | None:
    """One estimate for all checks of one setup."""
    notes = setup.notes
    if "estimate" not in notes:
        notes["estimate"] = estimated(setup)
    found: tuple[Estimate, list[str]] | None = notes["estimate"]
    return found


def _where(setup: Setup) -> Place:
    fact: Fact | None = next(
        (f for n in ("strategy.micro_batch_size", "training.global_batch_size", "model.name", "model.hidden_size") if (f := setup.fact(n))),
        None,
    )
    return fact.place if fact else first_place(setup)


SURELY = 1.3  # what is assumed (length, GPU) may be off by that much


def fits(setup: Setup) -> Iterator[Finding]:
    found = _cached(setup)
    if found is None:
        return
    estimate, assumed = found
    memory = estimate.memory_dict()
    if memory["verdict"] == "fits":
        return
    said = bool(setup.asked.get("on"))
    over = estimate.device_bytes > SURELY * estimate.capacity_bytes
    severity: Severity = (ERROR if said else WARNING if over else NOTE) if memory["verdict"] == "no" else WARNING if said else NOTE
    breakdown = sorted(memory["breakdown"].items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{k.replace('_', ' ')} {format_bytes(v)}" for k, v in breakdown if v)
    cluster = estimate.cluster
    sure = f" (assumed: {', '.join(assumed)})" if assumed else ""
    yield Finding(
        "K04", severity, _where(setup),
        f"{'Does not fit' if memory['verdict'] == 'no' else 'Fits with no margin'}: {format_bytes(estimate.device_bytes)} of "
        f"{format_bytes(estimate.capacity_bytes)} on each of {cluster.gpus} {cluster.gpu.id}{sure}; "
        f"the peak is in {memory['peak_phase']} ({parts}).",
        lever(estimate) or "More GPUs, or a larger share of offload.",
    )  # fmt: skip


LEVERS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("full recomputation (gradient checkpointing)", {"strategy": {"recompute": "full"}}),
    ("half the micro-batch", {}),
    ("a fused or chunked loss", {"training": {"loss": "chunked"}}),
    ("ZeRO-3 / FSDP", {"strategy": {"sharding": "zero3"}}),
    ("full recomputation and a micro-batch of 1", {"strategy": {"recompute": "full", "micro_batch_size": 1}}),
    ("the optimizer in host memory", {"strategy": {"offload": "optimizer-cpu"}}),
    ("parameters and optimizer in host memory", {"strategy": {"offload": "params-cpu", "sharding": "zero3"}}),
    ("LoRA", {"training": {"method": "lora"}}),
)


def lever(estimate: Estimate) -> str:
    """The first change, from the cheapest on, with which it fits, and what it then takes."""
    spec = dict(estimate.spec)
    for words, change in LEVERS:
        changed = {k: {**spec[k], **change.get(k, {})} if isinstance(spec[k], dict) else spec[k] for k in spec}
        if words == "half the micro-batch":
            micro = estimate.plan.micro_batch_size
            if micro < 2 or micro % 2:
                continue
            changed["strategy"] = {**changed["strategy"], "micro_batch_size": micro // 2}
        if changed == spec or (
            changed["strategy"].get("recompute") == "full"
            and estimate.plan.structure.recompute != "full"
            and "recompute_modules" in changed["strategy"]
        ):
            continue
        for derived in ("dp_replicate", "dp_shard", "dp"):
            if "sharding" in change.get("strategy", {}):
                changed["strategy"].pop(derived, None)
        try:
            after = _estimate(changed)
        except TrainwrightError:
            continue
        if after.fits and after.device_bytes < estimate.device_bytes:
            return f"{words[0].upper()}{words[1:]}: {format_bytes(after.device_bytes)}."
    return ""


def host(setup: Setup) -> Iterator[Finding]:
    """Memory and disk of a node: what offload holds, and what loading takes."""
    found = _cached(setup)
    if found is None:
        return
    estimate = found[0]
    memory, cluster = estimate.memory_dict(), estimate.cluster
    need, have = memory["host_bytes_per_node"], cluster.host_memory_bytes
    if need and have and need > have:
        yield Finding(
            "K35", ERROR if setup.asked.get("on") else WARNING, _place_of(setup, "strategy.offload"), f"Offload holds {format_bytes(need)} "
            f"in the memory of a node that has {format_bytes(have)}.",
            "Offload the optimizer only, use NVMe, or more nodes.",
        )  # fmt: skip
    elif need and not have:
        yield Finding(
            "K35", NOTE, _place_of(setup, "strategy.offload"), f"Offload holds {format_bytes(need)} in the memory of each node.", ""
        )
    disk, space = memory["nvme_bytes_per_node"], cluster.nvme_bytes
    if disk and space and disk > space:
        yield Finding(
            "K35",
            WARNING,
            _place_of(setup, "strategy.offload"),
            f"{format_bytes(disk)} of NVMe are needed a node, {format_bytes(space)} are there.",
            "More nodes, or less on disk.",
        )
    if have and not any(v.on("fsdp_cpu_ram_efficient_loading", "cpu_ram_efficient_loading", "low_cpu_mem_usage") for v in setup.views):
        weights = estimate.model.parameters * 2
        sharded = str(setup.value("strategy.framework")) in ("fsdp1", "fsdp2")
        if (
            sharded
            and weights * cluster.gpus_per_node > have
            and any(v.format in ("accelerate", "trainer", "trl", "axolotl") for v in setup.views)
        ):
            yield Finding(
                "K35", WARNING, _where(setup), f"Every process loads the whole model first: {cluster.gpus_per_node} x "
                f"{format_bytes(weights)} in a node of {format_bytes(have)}.",
                "fsdp_cpu_ram_efficient_loading: true with fsdp_sync_module_states: true.",
            )  # fmt: skip


def _place_of(setup: Setup, name: str) -> Place:
    fact = setup.fact(name)
    return fact.place if fact else _where(setup)


FAR = 0.5  # of what the same model reaches on the same GPUs with the usual choices


def speed(setup: Setup) -> Iterator[Finding]:
    """Far under what these GPUs give others with the same model, and which choice costs it. Only where model and cluster were asked about or stated."""
    found = _cached(setup)
    if found is None or found[1]:
        return
    estimate, _ = found
    now = estimate.mfu
    spec = dict(estimate.spec)
    structure = estimate.plan.structure
    tried: list[tuple[str, Any]] = []
    for words, change in (
        ("FlashAttention", {"attention": "flash"}), ("no recomputation", {"recompute": "none"}), ("a larger micro-batch",
            {"micro_batch_size": 4 * estimate.plan.micro_batch_size}),
        ("no offload", {"offload": "none"}), ("tensor parallelism 1", {"tp": 1}),
    ):  # fmt: skip
        if all(spec["strategy"].get(k) == v for k, v in change.items()) or (structure.attention == "flash" and "attention" in change):
            continue
        strategy = {k: v for k, v in {**spec["strategy"], **change}.items() if k not in ("dp", "dp_replicate", "dp_shard")}
        training = dict(spec["training"])
        try:
            after = _estimate({**spec, "strategy": strategy, "training": training})
        except TrainwrightError:
            continue
        if after.fits and after.mfu > now * 1.15:
            tried.append((words, after.mfu))
    best = max(tried, key=lambda t: t[1], default=None)
    if best and (now < best[1] * (1 - FAR / 2) or now < 0.2):
        yield Finding(
            "K42", NOTE if now >= 0.2 else WARNING, _where(setup), f"{now:.0%} of the peak of {estimate.cluster.gpu.id}; {best[0]} would "
            f"bring {best[1]:.0%} and still fit.", f"{best[0][0].upper()}{best[0][1:]}.",
        )  # fmt: skip
    elif now < 0.2:
        shares = sorted(estimate.to_dict()["time"]["breakdown"].items(), key=lambda item: -item[1])[:3]
        total = estimate.step_s
        yield Finding(
            "K42",
            NOTE,
            _where(setup),
            f"{now:.0%} of the peak of {estimate.cluster.gpu.id}: the step goes to "
            + ", ".join(f"{k} {v / total:.0%}" for k, v in shares)
            + ".",
        )


_ARGS = (
    "model_name_or_path: meta-llama/Llama-3.1-8B\nbf16: true\nper_device_train_batch_size: {}\ngradient_accumulation_steps: 2\n"
    "learning_rate: 1.0e-5\noutput_dir: out\nnum_train_epochs: 1\nmax_length: 4096\n{}"
)
CHECK = (
    Check(
        "K04", "memory of a GPU", fits, Example({"args.yaml": _ARGS.format(8, "")}, on="8xA100-40GB"),
        "error where it does not fit on the GPUs that were named; warning where they were assumed or nothing is left over",
    ),
    Check(
        "K35", "memory of the host", host,
        Example({"args.yaml": _ARGS.format(1, "gradient_checkpointing: true\ndeepspeed: ds.json\n").replace("8B", "70B"),
                 "ds.json": '{\n  "train_micro_batch_size_per_gpu": "auto",\n  "train_batch_size": "auto",\n  "gradient_accumulation_steps": '
                 '"auto",\n  "bf16": {"enabled": "auto"},\n'
                 '  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}\n}\n'}, on="1xA100-80GB"),
        "error where a node has less than offload holds; note with what it holds",
    ),
    Check(
        "K42", "speed against what these GPUs give", speed, Example({"args.yaml": _ARGS.format(1, "attn_implementation: eager\n"
        "gradient_checkpointing: true\nfsdp: full_shard auto_wrap\n")}, on="8xH100"),
        "warning below 20 % of the peak with a better choice at hand; note otherwise",
    ),
)  # fmt: skip
