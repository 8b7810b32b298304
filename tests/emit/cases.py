"""Runs for the tests of `trainwright.emit`: one by hand for each framework, and legal ones at random."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from trainwright.api import load
from trainwright.emit.base import dig
from trainwright.errors import SpecError
from trainwright.frameworks import FRAMEWORKS
from trainwright.resolve import Run, resolve
from trainwright.search.constraints import check_plan

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "deepspeed": [{}, {"overlap_comm": False}, {"reduce_bucket_size": 10**7, "round_robin_gradients": True}],
    "megatron": [{}, {"overlap_grad_reduce": False}, {"exp_avg_dtype": "bf16"}],
    "fsdp2": [{}, {"no_sync": False}, {"no_sync": True}],
}
MODELS = ("llama-3.1-8b", "qwen3-1.7b", "gpt2-xl", "qwen3-30b-a3b")
BY_HAND: dict[str, dict[str, Any]] = {
    "torchtitan": {"strategy": {"framework": "fsdp2", "tp": 2, "pp": 2, "recompute": "selective"}},
    "megatron": {"strategy": {"framework": "megatron", "tp": 4, "pp": 2, "recompute": "selective"}},
    "deepspeed": {"strategy": {"framework": "deepspeed", "sharding": "zero3", "offload": "params-nvme"}},
    "fsdp": {"strategy": {"framework": "fsdp2", "recompute": "full"}},
    "accelerate": {"strategy": {"framework": "fsdp2", "recompute": "full"}, "training": {"gradient_dtype": "bf16"}},
    "trainer": {"strategy": {"framework": "fsdp2", "recompute": "full"}, "training": {"gradient_dtype": "bf16"}},
    "torchrun": {"strategy": {"framework": "fsdp2", "recompute": "full"}},
    "slurm": {"strategy": {"framework": "megatron", "tp": 8}},
    "kubernetes": {"strategy": {"framework": "fsdp2", "recompute": "full"}},
    "skypilot": {"strategy": {"framework": "deepspeed", "sharding": "zero2"}},
}


def run_of(document: dict[str, Any]) -> Run:
    whole = {"model": "llama-3.1-8b", "cluster": "16xH100", **document}
    whole["training"] = {"seq_len": 4096, "global_batch_size": 64, "tokens": 1e9, **document.get("training", {})}
    return resolve(load(whole))


@st.composite
def documents(draw: st.DrawFn, framework: str | None = None) -> dict[str, Any]:
    """Run specs with most fields drawn; not all of them are legal."""
    name = framework or draw(st.sampled_from(sorted(FRAMEWORKS)))
    form = FRAMEWORKS[name]
    nodes = draw(st.sampled_from([1, 2, 4]))
    axis = {a: draw(st.sampled_from([1, 1, 1, 2, 4])) if a in form.axes else 1 for a in ("tp", "pp", "cp", "ep")}
    sharding = draw(st.sampled_from(form.shardings))
    schedule = draw(st.sampled_from(form.schedules or ("1f1b",))) if axis["pp"] > 1 else "1f1b"
    looped = schedule in ("interleaved-1f1b", "looped-bfs", "interleaved-zb1p", "zb-v", "dualpipe-v")
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    strategy = {
        "framework": name, **axis, "sharding": sharding, "schedule": schedule, "virtual_stages": 2 if looped else 1,
        "micro_batch_size": draw(st.sampled_from([1, 2])),
        "dp_replicate": draw(st.sampled_from([None, None, 2])) if sharding != "none" else None,
        "recompute": recompute, "recompute_every": draw(st.sampled_from([1, 2])) if recompute == "full" else None,
        "attention": draw(st.sampled_from(["flash", "flash", "efficient", "eager"])),
        "offload": draw(st.sampled_from(form.offloads)),
        "cp_kind": draw(st.sampled_from(["ring", "allgather", "ulysses"])),
        "compile": draw(st.booleans()), "async_tp": draw(st.booleans()) and axis["tp"] > 1, "cuda_graphs": draw(st.sampled_from([False, False, True])),
        "reshard_root": draw(st.booleans()),
        "sequence_parallel": axis["tp"] > 1 and draw(st.booleans()),
        "options": draw(st.sampled_from(OPTIONS.get(name, [{}]))),
    }  # fmt: skip
    training = {
        "seq_len": draw(st.sampled_from([1024, 4096])),
        "global_batch_size": draw(st.sampled_from([64, 128])),
        "tokens": draw(st.sampled_from([None, 1e9, 123_456_789.0])),
        "precision": draw(st.sampled_from(["bf16", "bf16", "fp16", "fp32", "fp8"])),
        "optimizer": draw(st.sampled_from(["adamw", "adamw", "lion", "sgd", "sgd_momentum", "adam8bit"])),
        "optimizer_kernel": draw(st.sampled_from(["fused", "fused", "foreach", "for-loop"])),
        "loss": draw(st.sampled_from([None, None, "plain", "chunked", "fused", "vocab-parallel"])),
        "gradient_dtype": draw(st.sampled_from([None, None, "fp32", "bf16"])),
        "dropout": draw(st.sampled_from([0.0, 0.0, 0.1])),
    }
    drop = {k: v for k, v in strategy.items() if v is not None}
    return {
        "model": draw(st.sampled_from(MODELS)),
        "cluster": {"gpu": "h100", "nodes": nodes, "gpus_per_node": 8},
        "training": {k: v for k, v in training.items() if v is not None},
        "strategy": drop,
    }


def legal(document: dict[str, Any]) -> Run | None:
    """The resolved run, None where a rule forbids it."""
    try:
        run = resolve(load(document))
        check_plan(run.model, run.cluster, run.job, run.plan)
    except SpecError:
        return None
    return run


def flat(document: dict[str, Any]) -> dict[str, Any]:
    """{"strategy.tp": 2, ...} of a partial run spec; the options stay one value."""
    found: dict[str, Any] = {}
    for section, fields in document.items():
        if section == "model":
            found["model"] = fields
        else:
            found |= {f"{section}.{k}": v for k, v in fields.items()}
    return found


def same(field: str, read: Any, run: Run) -> bool:
    """Whether what was read back is what the plan said; tokens to a whole step, options that the plan named among those that the writer works out."""
    said = dig(run.filled, field)
    if said is None:
        return True
    if field == "training.tokens":
        return read is not None and 0 <= read - said < run.job.tokens_per_step
    if field == "strategy.options":
        return all((read or {}).get(k) == v for k, v in said.items())
    if field == "training.optimizer_kernel" and run.job.optimizer != "adamw":
        return True
    return bool(read == said)
