"""Every byte and every call that a layout sends in a step is in its plan, and none is planned that is not sent: all layouts that the other tests train.

Counted rank by rank of the pipeline, one rank of each, without the others (see counted.py); `test_measure_runs` counts on real ranks as well.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")
import test_context as context
import test_experts as experts
import test_layouts as layouts
import test_pipeline as pipeline
import torch
import torch.distributed as dist
from counted import differences, world
from layouts import MODELS, batch, run_of

from trainwright.cost.goodput import checkpoint_bytes
from trainwright.cost.traffic.buckets import filled
from trainwright.schedules import SCHEDULES
from trainwright.train.device import Machine
from trainwright.train.mesh import ranks_of
from trainwright.train.settings import Settings
from trainwright.train.state import everything
from trainwright.train.step import Trainer

CASES: dict[str, tuple[Any, ...]] = {f"gpt, {name}": ("gpt", *case) for name, case in layouts.CASES.items()}
CASES |= {f"llama, {name}": ("llama", *case) for name, case in layouts.LLAMA_CASES.items()}
CASES |= {f"moe, {name}": ("moe", *case) for name, case in layouts.MOE_CASES.items()}
CASES |= {f"gpt, {name}": ("gpt", *case) for name, case in layouts.PRECISIONS.items()}
CASES |= {f"{name}, two ranks": ("gpt-7", pipeline.layout(name, 2)) for name in pipeline.NAMES}
CASES |= {
    f"{name}, four ranks": ("tied-7" if SCHEDULES[name].splits_backward else "llama-7", pipeline.layout(name, 4)) for name in pipeline.NAMES
}
CASES |= {
    f"{name} x {beside}": ("tied-7", pipeline.layout(name, 2, **more))
    for name in pipeline.KINDS
    for beside, more in pipeline.BESIDE.items()
}
CASES |= {f"{name}, experts": ("moe-7", pipeline.layout(name, 2, dp=2, ep=2, sharding="zero3")) for name in pipeline.KINDS}
CASES |= {f"experts, {name}": ("moe", strategy) for name, strategy in experts.LAYOUTS.items()}
CASES |= {f"experts with room, {name}": ("moe", experts.LAYOUTS[name], {"moe_capacity_factor": 0.5}) for name in experts.WHOLE}
for _kind in context.KINDS:
    _cut = {"cp": 2, "cp_kind": _kind}
    CASES |= {f"{_kind}": ("llama", _cut), f"{_kind}, packed": ("llama", _cut, {}, True)}
    CASES |= {f"{_kind}, recompute full": ("llama", {**_cut, "recompute": "full"}, {}, True)}
    CASES |= {f"{_kind}, recompute core": ("llama", {**_cut, "recompute": "selective", "recompute_modules": ["core_attn"]})}
    CASES |= {f"{_kind} x {name}": ("gpt", {**_cut, **more}, {}, True) for name, more in context.BESIDE.items()}
CASES |= {"ring, bf16": ("llama", {"cp": 4, "cp_kind": "ring", "micro_batch_size": 8}, {"precision": "bf16"})}
CASES |= {f"Muon, {name}": ("gpt", layouts.CASES[name][0], {"optimizer": "muon"}) for name in ("zero3 x tp", "zero2 x sp", "ddp x tp")}
CASES |= {
    "fewer experts than shards": ("few experts", {"dp": 4, "sharding": "zero3"}),
    "fewer experts of a rank than shards": ("few experts", {"dp": 4, "ep": 2, "sharding": "zero2"}),
}
CASES |= {f"Muon, experts, {name}": ("moe", experts.LAYOUTS[name], {"optimizer": "muon"}) for name in ("zero3 2, ep 2", "hsdp 2x2, ep 2")}
CASES |= {
    f"Muon, {name}": (*CASES[name], {"optimizer": "muon"}) for name in ("fewer experts than shards", "fewer experts of a rank than shards")
}

GATE = (
    "gpt, ddp 2",
    "gpt, zero1 x pp",
    "gpt, zero3 x sp",
    "gpt, hsdp 2x2",
    "dualpipe, two ranks",
    "allgather, recompute full",
    "experts, sp 2, dp 2, ep 2",
    "fewer experts than shards",
)


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in GATE else pytest.mark.slow) for c in CASES])
def test_the_plan_says_what_is_sent(case: str) -> None:
    assert differences(*CASES[case]) == []


# More than one bucket: a table of 30 MiB, matrices that fill the first one, and more of them than a bucket holds.
MODELS |= {
    "large": {**MODELS["gpt"], "n_layer": 1, "n_embd": 128, "vocab_size": 60_000},
    "wide": {**MODELS["gpt"], "n_embd": 512, "n_layer": 3, "vocab_size": 8192},
    "wide tied": {**MODELS["tied"], "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 6000},
    "wide moe": {**MODELS["moe"], "hidden_size": 512, "intermediate_size": 512},
}
BUCKETS: dict[str, tuple[str, dict[str, Any]]] = {
    "two": ("moe", {"dp": 2}),
    "large": ("large", {"dp": 4}),
    "wide": ("wide", {"dp": 2}),
    "zero1": ("wide", {"dp": 2, "sharding": "zero1"}),
    "static": ("wide tied", {"dp": 2, "micro_batch_size": 4}),
    "given": ("wide tied", {"dp": 2, "options": {"bucket_cap_mb": 4}}),
    "tp": ("wide tied", {"dp": 2, "tp": 2}),
    "pp": ("wide tied", {"dp": 2, "pp": 2}),
    "chunks": ("wide tied", {"dp": 2, "pp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2, "micro_batch_size": 1}),
    "chunks x tp": ("wide tied", {"dp": 2, "pp": 2, "tp": 2, "schedule": "zb-v", "virtual_stages": 2, "micro_batch_size": 1}),
    "experts": ("wide moe", {"dp": 2, "ep": 2}),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c == "two" else pytest.mark.slow) for c in BUCKETS])
def test_gradients_fill_as_many_buckets_as_planned(case: str) -> None:
    model, strategy = BUCKETS[case]
    assert differences(model, {"framework": "ddp", **strategy}) == []


def test_buckets_are_those_of_pytorch() -> None:
    """The planner's rule and the function that the reducer rebuilds its buckets with."""
    made = random.Random(0)
    for _ in range(50):
        sizes = [made.randrange(1, 4000) for _ in range(made.randrange(1, 40))]
        tensors = [torch.empty(n, device="meta") for n in sizes]
        first, cap = made.randrange(1, 9000), made.randrange(1, 30_000)
        indices, _ = dist._compute_bucket_assignment_by_size(tensors, [first, cap])
        assert filled([4 * n for n in sizes], first, cap) == [sum(4 * sizes[i] for i in bucket) for bucket in indices]


def test_what_is_not_planned_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that sums a norm's gradient in every pass is one that the plan did not mean."""
    from trainwright.train import reduce

    monkeypatch.setattr(reduce.Turn, "sums", property(lambda self: True, lambda self, value: None), raising=False)
    (line,) = (d for d in differences("gpt", layouts.SINGLE["sp 2"][0]) if "calls" in d)
    assert "tp all_reduce, calls: 18 planned, 72 sent" in line


@pytest.mark.parametrize(
    ("strategy", "training"),
    [
        ({"framework": "ddp"}, {}),
        ({"framework": "ddp"}, {"master_weights": "none"}),
        ({"framework": "fsdp2", "sharding": "zero2"}, {}),
        ({"framework": "fsdp2", "sharding": "none"}, {"autocast": True}),
        ({"framework": "ddp"}, {"optimizer": "muon"}),
    ],
)
def test_a_checkpoint_holds_the_bytes_that_the_run_is_priced_with(strategy: dict[str, Any], training: dict[str, Any]) -> None:
    """Masters or weights and both moments; AdamW's step counters are four bytes a tensor more."""
    run = run_of("llama", strategy, {"precision": "bf16", **training})
    with world(1, 0):
        trainer = Trainer(run, Settings(steps=3, warmup_steps=0), ranks_of(run.plan, Machine("cpu", "fake")))
        trainer.step(batch(0))
        kept = everything(trainer)
        held = sum(t.numel() * t.element_size() for _, t in kept)
    counters = sum(4 for name, _ in kept if name.endswith(".step"))
    assert held - counters == checkpoint_bytes(run.model, run.job, run.plan.structure)
