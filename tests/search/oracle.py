"""The constraints again, one plan at a time, in plain Python: what the masks are held against."""

from __future__ import annotations

from collections.abc import Callable

from trainwright.errors import SpecError
from trainwright.schedules import SCHEDULES
from trainwright.search.rules import Case
from trainwright.spec.plan import ParallelPlan

ZERO = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}
AXES = {
    "megatron": {"dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"},
    "fsdp2": {"dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"},
    "deepspeed": {"dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"},
    "fsdp1": {"dp_replicate", "dp_shard", "tp"},
    "ddp": {"dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"},
}
SHARDINGS = {
    "megatron": {"none", "zero1"},
    "fsdp2": {"none", "zero2", "zero3"},
    "fsdp1": {"none", "zero2", "zero3"},
    "ddp": {"none", "zero1"},
    "deepspeed": {"none", "zero1", "zero2", "zero3"},
}
EXPERT_WIDTH, MLP_WIDTH = "moe_ffn", "ffn"


def facts(case: Case) -> dict[str, int]:
    c = case.model.config
    mixture = "num_local_experts" in c
    return {
        "heads": c["num_attention_heads"],
        "kv": c["num_key_value_heads"],
        "ffn": 0 if mixture else c["intermediate_size"],
        "expert_ffn": c["intermediate_size"] if mixture else 0,
        "experts": c.get("num_local_experts", 0),
        "layers": c["num_hidden_layers"],
    }


def splits(p: ParallelPlan) -> int:
    """Ranks over which a framework can shard states."""
    return p.dp_shard * (1 if p.structure.framework == "ddp" else p.cp)


def alone(framework: str) -> tuple[str, ...]:
    """What a single rank may be told: DeepSpeed moves the optimizer to the host from ZeRO-1 on."""
    return ("none", "zero1") if framework == "deepspeed" else ("none",)


def tp_heads(case: Case, p: ParallelPlan) -> bool:
    return facts(case)["heads"] % p.tp == 0


def kv_heads(case: Case, p: ParallelPlan) -> bool:
    kv = facts(case)["kv"]
    return kv % p.tp == 0 or (p.structure.framework == "megatron" and p.tp % kv == 0)


def mlp(case: Case, p: ParallelPlan) -> bool:
    c = case.model.config
    width = c["num_attention_heads"] * (c["hidden_size"] // c["num_attention_heads"])
    return width % p.tp == 0 and facts(case)["ffn"] % p.tp == 0


def cp(case: Case, p: ParallelPlan) -> bool:
    if p.cp == 1:
        return True
    if p.structure.cp_kind != "ulysses":
        return case.job.seq_len % (2 * p.cp) == 0
    heads = facts(case)["heads"]
    return case.job.seq_len % p.cp == 0 and (heads % p.tp != 0 or (heads // p.tp) % p.cp == 0)


def order(case: Case, p: ParallelPlan) -> bool:
    if p.pp == 1:
        return True
    name, m, v = p.structure.schedule, p.accumulation, p.virtual_stages
    if name in ("interleaved-1f1b", "looped-bfs", "interleaved-zb1p"):
        right = v >= 2
    elif name in ("zb-v", "v-half", "v-min", "dualpipe-v"):
        right = v == 2
    else:
        right = v == 1
    try:
        SCHEDULES[name].rule(p.pp, m, v)
    except SpecError:
        return False
    return right


def layers(case: Case, p: ParallelPlan) -> bool:
    stages = p.pp * p.virtual_stages
    return p.structure.layers_per_stage is not None or stages == 1 or stages <= facts(case)["layers"] + 2


def dealt(case: Case, p: ParallelPlan) -> bool:
    given = p.structure.layers_per_stage
    return given is None or (len(given) == p.pp * p.virtual_stages and sum(given) == facts(case)["layers"])


def smaller(case: Case, p: ParallelPlan) -> bool:
    def largest(v: int) -> int:
        layers, stages = facts(case)["layers"], p.pp * v
        if p.structure.framework in ("megatron", "deepspeed") and layers % stages == 0:
            return layers // stages
        return -(-(layers + 2) // stages)

    if p.structure.layers_per_stage is not None:
        return True
    return p.virtual_stages <= 2 or largest(p.virtual_stages) < largest(p.virtual_stages - 1)


def offload_stage(case: Case, p: ParallelPlan) -> bool:
    s = p.structure
    if s.framework == "deepspeed":
        least = {"none": 0, "activations-cpu": 0, "optimizer-cpu": 1}.get(s.offload, 3)
    else:
        least = 2 if s.offload in ("params-cpu", "params-nvme") else 0
    return ZERO[s.sharding] >= least


def offloads(case: Case, p: ParallelPlan) -> bool:
    s = p.structure
    if s.framework == "deepspeed":
        return True
    return s.offload in {"none", "optimizer-cpu", "activations-cpu"} | ({"params-cpu"} if s.framework.startswith("fsdp") else set())


def schedule(case: Case, p: ParallelPlan) -> bool:
    known = {
        "megatron": {"gpipe", "1f1b", "interleaved-1f1b"},
        "deepspeed": {"1f1b"},
    }
    return p.pp == 1 or p.structure.framework in ("fsdp2", "ddp") or p.structure.schedule in known.get(p.structure.framework, set())


def ep(case: Case, p: ParallelPlan) -> bool:
    experts = facts(case)["experts"]
    return experts % p.ep == 0 if experts else p.ep == 1


def etp(case: Case, p: ParallelPlan) -> bool:
    width = facts(case)["expert_ffn"]
    return width % p.etp == 0 if width else p.etp == 1


def scaleup(case: Case, p: ParallelPlan) -> bool:
    return p.tp == 1 or min(8, case.cluster.gpus) % p.tp == 0


def sequence(case: Case, p: ParallelPlan) -> bool:
    return not p.structure.sequence_parallel or case.job.seq_len % (p.cp * p.tp) == 0


def axes(case: Case, p: ParallelPlan) -> bool:
    known = AXES[p.structure.framework]
    return all(getattr(p, a) == 1 for a in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep") if a not in known)


ORACLE: dict[str, Callable[[Case, ParallelPlan], bool]] = {
    "degrees multiply to the GPU count": lambda c, p: (
        p.dp_replicate * p.dp_shard * p.tp * p.pp * p.cp == c.cluster.nodes * c.cluster.gpus_per_node
    ),
    "the framework has the axis": axes,
    "tp divides the attention heads": tp_heads,
    "tp divides the key-value heads": kv_heads,
    "tp divides the MLP width": mlp,
    "cp divides the sequence": cp,
    "dp divides the global batch": lambda c, p: (
        p.dp_replicate * p.dp_shard * p.micro_batch_size * p.accumulation == c.job.global_batch_size
    ),
    "pipeline stages hold something": layers,
    "layers_per_stage deals every layer": dealt,
    "experts divide over ep": ep,
    "etp divides the expert width": etp,
    "ep fits into dp x cp x tp / etp": lambda c, p: p.dp * p.cp * p.tp % (p.ep * p.etp) == 0,
    "virtual stages need a pipeline": lambda c, p: p.pp > 1 or p.virtual_stages == 1,
    "the framework runs the schedule": schedule,
    "the schedule has an order": order,
    "unsplit gradients are of the weights' type": lambda c, p: (
        (p.structure.framework, p.structure.sharding) != ("deepspeed", "none")
        or c.job.gradient_dtype in {"fp32": ("fp32",), "fp16": ("fp16",)}.get(c.job.precision, ("bf16", "fp32"))
    ),
    "ZeRO-1 beside experts": lambda c, p: p.ep == 1 or p.structure.framework != "ddp" or p.structure.sharding != "zero1",
    "the framework has the sharding": lambda c, p: p.structure.sharding in SHARDINGS[p.structure.framework],
    "sharding none keeps whole copies": lambda c, p: p.structure.sharding != "none" or p.dp_shard == 1,
    "ZeRO stage with pipeline": lambda c, p: p.pp == 1 or p.structure.framework != "deepspeed" or ZERO[p.structure.sharding] < 2,
    "the framework has the offload": offloads,
    "sequence parallelism divides the sequence": sequence,
    "no accumulation with optimizer_in_backward": lambda c, p: not c.job.optimizer_in_backward or p.accumulation == 1,
    "the GPU has the low-precision format": lambda c, p: (
        c.job.precision not in ("fp8", "fp4") or c.job.precision in c.cluster.gpu.peak_flops
    ),
    "the GPU has the 16-bit format": lambda c, p: c.job.precision not in ("bf16", "fp16") or c.job.precision in c.cluster.gpu.peak_flops,
    "FlashAttention needs Ampere": lambda c, p: p.structure.attention != "flash" or float(c.cluster.gpu.arch) >= 8,
    "tp stays inside the scale-up domain": scaleup,
    "cp leaves whole tiles": lambda c, p: p.cp == 1 or p.micro_batch_size * c.job.seq_len / p.cp >= 128,
    "micro-batches fill the pipeline": lambda c, p: p.pp == 1 or p.accumulation >= p.pp,
    "virtual stages make stages smaller": smaller,
    "sequence parallelism needs tp": lambda c, p: p.tp > 1 or not p.structure.sequence_parallel,
    "sharding has ranks to split over": lambda c, p: p.structure.sharding in alone(p.structure.framework) or splits(p) > 1,
    "offload suits the ZeRO stage": offload_stage,
    "async_tp needs tp": lambda c, p: p.tp > 1 or not p.structure.async_tp,
    "recompute_modules need selective": lambda c, p: not p.structure.recompute_modules or p.structure.recompute == "selective",
    "fp8_params need fp8": lambda c, p: not p.structure.fp8_params or c.job.precision in ("fp8", "fp4"),
}
