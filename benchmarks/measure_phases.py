"""Measure what PyTorch itself allocates, without a GPU: one rank of a fake world, fake tensors, real modules and wrappers.

    python benchmarks/measure_phases.py specs.jsonl measured.jsonl       (an environment with torch 2.13 and transformers 5)

Each line of the input is {"id", "spec"}; each line of the output adds "measured": the peak of forward and backward, that of the optimizer step, and
what is alive between them, in the second step. ``tests/data/measured_memory.jsonl`` was made by it. Every tensor storage that an operation makes is
counted until it is freed; DTensor's own operations are seen from inside, its shape propagation is not. Models: transformers' own, and a GPT-2 with
separate q, k, v. Loss and logits are made inside the wrapped module. Not for DDP (its reducer cannot read fake work).
"""

from __future__ import annotations

import collections
import contextlib
import json
import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, _sharding_prop
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
aten = torch.ops.aten


class Tracker(TorchDispatchMode):
    """Live bytes of all storages, their peak since it was last reset."""

    paused = 0

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.live = self.peak = 0

    def seen(self, value: Any) -> None:
        if Tracker.paused or not isinstance(value, torch.Tensor):
            return
        storage = value._local_tensor.untyped_storage() if isinstance(value, DTensor) else value.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            weakref.finalize(storage, self.gone, key)
            self.grow(storage.nbytes())

    def grow(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def gone(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # let it become operations on local tensors first
        out = func(*args, **(kwargs or {}))
        for value in tree_flatten(out)[0]:
            self.seen(value)
        return out

    def __enter__(self) -> Any:
        """FSDP2 frees and makes parameters by resizing their storages."""
        self.resize = original = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            out, key = original(storage, size), storage._cdata
            if key in self.sizes:
                before, self.sizes[key] = self.sizes[key], size
                self.grow(size - before)
            return out

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]
        return super().__exit__(*error)


def _outside(owner: Any, name: str, pause: bool) -> None:
    """A method that runs without modes (a mesh's own tensors are real) or unseen (shape propagation)."""
    raw = owner.__dict__[name]
    function = raw.__func__ if isinstance(raw, staticmethod) else raw

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not pause:
            with _disable_current_modes():
                return function(*args, **kwargs)
        Tracker.paused += 1
        try:
            return function(*args, **kwargs)
        finally:
            Tracker.paused -= 1

    setattr(owner, name, staticmethod(wrapped) if isinstance(raw, staticmethod) else wrapped)


for _name in ("_concatenate", "_flatten"):
    _outside(DeviceMesh, _name, False)
_outside(_sharding_prop.ShardingPropagator, "_propagate_tensor_meta_non_cached", True)


# ---- models


def repeat(x: Any, times: int) -> Any:
    b, h, s, d = x.shape
    return x if times == 1 else x[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)


def attend(q: Any, k: Any, v: Any, kind: str) -> Any:
    """By name: the fused kernels as CUDA has them (their meta kernels), or every matrix in memory."""
    if kind != "flash":
        k, v = (repeat(x, q.shape[1] // x.shape[1]) for x in (k, v))
    if torch.is_autocast_enabled("cpu") and kind != "eager":
        q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    if kind == "flash":
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    if kind == "efficient":
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0]
    weights = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    return torch.matmul(F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype), v)


def hf_attention(module: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
    def core(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, module.config._kind).transpose(1, 2).contiguous()

    return (checkpoint(core, q, k, v, use_reentrant=False) if module.config._core else core(q, k, v)), None


class Core(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, self.kind)


class GptAttention(nn.Module):
    def __init__(self, h: int, heads: int, kind: str, core: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(h, h) for _ in range(4))
        self.d, self.core = h // heads, checkpoint_wrapper(Core(kind)) if core else Core(kind)

    def forward(self, x: Any) -> Any:
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, -1, self.d).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(self.core(q, k, v).transpose(1, 2).reshape(b, s, -1))


class GptMlp(nn.Module):
    def __init__(self, h: int, f: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(h, f), nn.Linear(f, h)

    def forward(self, x: Any) -> Any:
        return self.down(F.gelu(self.up(x)))


class GptBlock(nn.Module):
    def __init__(self, h: int, f: int, heads: int, kind: str, core: bool) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2, self.mlp = nn.LayerNorm(h), GptAttention(h, heads, kind, core), nn.LayerNorm(h), GptMlp(h, f)

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    def __init__(self, c: dict[str, Any], kind: str, core: bool) -> None:
        super().__init__()
        h = c["n_embd"]
        self.wte, self.wpe = nn.Embedding(c["vocab_size"], h), nn.Embedding(c["n_positions"], h)
        self.layers = nn.ModuleList(GptBlock(h, c.get("n_inner") or 4 * h, c["n_head"], kind, core) for _ in range(c["n_layer"]))
        self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, c["vocab_size"], bias=False)
        if c.get("tie_word_embeddings", True):
            self.head.weight = self.wte.weight

    def forward(self, ids: Any, positions: Any) -> Any:
        x = self.wte(ids) + self.wpe(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class WithLoss(nn.Module):
    """The model, its logits and its loss in one module, as FSDP2's root."""

    def __init__(self, inner: nn.Module, gpt: bool) -> None:
        super().__init__()
        self.m, self.gpt = inner, gpt

    @property
    def layers(self) -> Any:
        return self.m.layers if self.gpt else self.m.model.layers

    def forward(self, ids: Any, positions: Any, labels: Any) -> Any:
        if self.gpt:
            logits = self.m(ids, positions)
        else:
            logits = self.m(input_ids=ids, position_ids=positions, use_cache=False).logits
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), labels.view(-1))


def build(config: dict[str, Any], kind: str, core: bool) -> WithLoss:
    config = dict(config)
    if config["model_type"] == "gpt2":
        return WithLoss(Gpt(config, kind, core), True)
    ALL_ATTENTION_FUNCTIONS.register("measured", hf_attention)
    conf = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    conf._attn_implementation, conf._kind, conf._core = "measured", kind, core
    return WithLoss(transformers.AutoModelForCausalLM.from_config(conf, attn_implementation="measured"), False)


# ---- parallelism, recomputation, adapters


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base, dtype = base, base.weight.dtype
        self.a = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.b = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.b(self.a(x)) * 2.0


def add_lora(model: WithLoss, rank: int, targets: list[str]) -> None:
    model.requires_grad_(False)
    for layer in model.layers:
        for module in list(layer.modules()):
            for name, child in list(module.named_children()):
                if name in targets and isinstance(child, nn.Linear):
                    setattr(module, name, Lora(child, rank))


def add_tensor_parallel(model: WithLoss, mesh: Any, sequence: bool, sharded_loss: bool) -> None:
    out = Shard(1) if sequence else Replicate()
    head = ColwiseParallel(input_layouts=out, output_layouts=Shard(-1) if sharded_loss else Replicate(), use_local_output=not sharded_loss)
    table = RowwiseParallel(input_layouts=Replicate(), output_layouts=out)
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    if model.gpt:
        ends = {"wte": table, "head": head} | ({"wpe": table, "norm": SequenceParallel()} if sequence else {})
        columns, rows_ = ("attn.q", "attn.k", "attn.v", "mlp.up"), ("attn.o", "mlp.down")
        norms, inputs = ("ln1", "ln2"), {"attn": whole, "mlp": whole}
    else:
        ends = {"model.embed_tokens": table, "lm_head": head} | ({"model.norm": SequenceParallel()} if sequence else {})
        columns = (*(f"self_attn.{x}_proj" for x in "qkv"), "mlp.gate_proj", "mlp.up_proj")
        rows_, norms = ("self_attn.o_proj", "mlp.down_proj"), ("input_layernorm", "post_attention_layernorm")
        states = {"hidden_states": Shard(1)}
        keyword = PrepareModuleInput(input_kwarg_layouts=states, desired_input_kwarg_layouts={"hidden_states": Replicate()})
        inputs = {"self_attn": keyword, "mlp": whole}
    parallelize_module(model.m, mesh, ends)
    for layer in model.layers:
        plan = {n: ColwiseParallel() for n in columns} | {n: RowwiseParallel(output_layouts=out) for n in rows_}
        parallelize_module(layer, mesh, plan | ({n: SequenceParallel() for n in norms} | inputs if sequence else {}))


def selective_contexts() -> Any:
    """torchtitan's list: attention, reduce-scatters, every second product."""
    saved = {
        aten.mm.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
    count: collections.Counter[bool] = collections.Counter()

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        count[context.is_recompute] += func == aten.mm.default
        keep = func in saved and not (func == aten.mm.default and count[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def meshes(s: dict[str, Any]) -> tuple[Any, Any]:
    """(data, tensor)"""
    with _disable_current_modes():
        if s["tp"] > 1:
            both = init_device_mesh("cpu", (s["dp"], s["tp"]), mesh_dim_names=("dp", "tp"))
            return both["dp"], both["tp"]
        shape = (s["dp_replicate"], s["dp_shard"]) if s.get("dp_replicate", 1) > 1 else (s["dp"],)
        return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]), None


def wrap(model: WithLoss, s: dict[str, Any], t: dict[str, Any], low: torch.dtype) -> WithLoss | None:
    """Tensor parallelism, checkpoints, FSDP2; the FSDP2 root if there is one."""
    data, tensor = meshes(s)
    if t["method"] == "lora":
        add_lora(model, t["lora_rank"], t["lora_targets"])
    if tensor is not None:
        add_tensor_parallel(model, tensor, s["sequence_parallel"], t.get("loss") == "vocab-parallel")
    by_op = s["recompute"] == "selective" and not s.get("recompute_modules")
    if s["recompute"] == "full" or by_op:
        for i, layer in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(layer, **({"context_fn": selective_contexts} if by_op else {}))
    if s["sharding"] == "none" and s["dp"] == 1:
        return None
    mixed = t["precision"] != "fp32" and t["master_weights"] == "fp32" and not t.get("autocast")
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=DTYPES[t["gradient_dtype"]]) if mixed else MixedPrecisionPolicy()
    zero3 = s["sharding"] == "zero3"
    for layer in [*model.layers, model]:
        if s["sharding"] == "none":
            replicate(layer, mesh=data, mp_policy=policy)
        else:
            after = zero3 and (layer is not model or s.get("reshard_root", True))
            fully_shard(layer, mesh=data, mp_policy=policy, reshard_after_forward=after)
    return model


def optimizer(params: list[Any], t: dict[str, Any]) -> Any:
    kernel = t.get("optimizer_kernel", "fused")
    loops = {"foreach": kernel == "foreach"}
    if t["optimizer"] == "adamw":
        return torch.optim.AdamW(params, lr=1e-3, fused=kernel == "fused", **loops)
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9 if t["optimizer"] == "sgd_momentum" else 0.0, **loops)


def measure(spec: dict[str, Any]) -> dict[str, int]:
    """The second step of one run."""
    s, t = spec["strategy"], spec["training"]
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=s["dp"] * s["tp"], store=FakeStore())
    low, batch, seq = DTYPES[t["precision"]], s["micro_batch_size"], t["seq_len"]
    count = t["global_batch_size"] // (batch * s["dp"])
    tracker, result = Tracker(), {}
    with FakeTensorMode(), tracker:
        torch.set_default_dtype(torch.float32 if t["master_weights"] == "fp32" else low)
        model = build(spec["model"], s["attention"], "core_attn" in s.get("recompute_modules", ())).train()
        torch.set_default_dtype(torch.float32)
        root = wrap(model, s, t, low)
        steps = optimizer([p for p in model.parameters() if p.requires_grad], t)
        ids, labels = (torch.zeros(batch, seq, dtype=torch.long) for _ in range(2))
        positions = torch.arange(seq).unsqueeze(0)
        for _ in range(2):
            steps.zero_grad(set_to_none=True)
            tracker.peak = 0
            for i in range(count):
                if root is not None and count > 1:
                    root.set_requires_gradient_sync(i == count - 1)
                sharded = t.get("loss") == "vocab-parallel" and s["tp"] > 1
                with loss_parallel() if sharded else contextlib.nullcontext():
                    with torch.autocast("cpu", dtype=low, enabled=bool(t.get("autocast"))):
                        loss = model(ids, positions, labels)
                    result["after_forward_bytes"] = tracker.live
                    loss.backward()
                del loss
            result["after_backward_bytes"], result["forward_backward_peak_bytes"] = tracker.live, tracker.peak
            tracker.peak = tracker.live
            steps.step()
            result["optimizer_peak_bytes"] = tracker.peak
    return result


def main() -> None:
    with open(sys.argv[1]) as cases, open(sys.argv[2], "a") as out:
        for line in cases:
            case = json.loads(line)
            try:
                case["measured"] = measure(case["spec"])
            except Exception as error:  # a case that PyTorch refuses must not hide the others
                case["error"] = f"{type(error).__name__}: {error}"[:200]
            print(case["id"], case.get("error", ""), file=sys.stderr)
            out.write(json.dumps(case) + "\n")


if __name__ == "__main__":
    main()
