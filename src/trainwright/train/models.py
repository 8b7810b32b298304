"""Modules of a family from its configuration: a plain GPT, transformers' own for the others; attention by kernel, LoRA, tensor-parallel plans,
checkpoints.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def repeat(x: torch.Tensor, n: int) -> torch.Tensor:
    """Key-value heads seen by every query head (transformers' ``repeat_kv``)."""
    if n == 1:
        return x
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, n, s, d).reshape(b, h * n, s, d)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str) -> torch.Tensor:
    """Causal attention by the kernel named; under autocast every input is cast to 16 bit first."""
    n = q.shape[1] // k.shape[1]
    if kind != "flash":
        k, v = repeat(k, n), repeat(v, n)
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        q, k, v = (x.to(low) for x in (q, k, v))
    if kind == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    if kind == "efficient":
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0]
    if kind == "sdpa-math":
        return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, None, 0.0, True)[0]
    if kind == "eager":
        w = torch.matmul(q, k.transpose(2, 3)) * (q.shape[-1] ** -0.5)
        w = F.softmax(w, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(w, v)
    raise ValueError(f"no attention kernel {kind!r}")


def hf_attention(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **_: Any) -> tuple[torch.Tensor, None]:
    def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, module.config.kernel)

    out = checkpoint(core, q, k, v, use_reentrant=False) if getattr(module.config, "checkpoint_core", False) else core(q, k, v)
    return out.transpose(1, 2).contiguous(), None


class Core(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, self.kind)


class Attention(nn.Module):
    def __init__(self, h: int, n: int, kind: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(h, h) for _ in range(4))
        self.d, self.core = h // n, Core(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, -1, self.d).transpose(1, 2)
        k = self.k(x).view(b, t, -1, self.d).transpose(1, 2)
        v = self.v(x).view(b, t, -1, self.d).transpose(1, 2)
        out = self.core(q, k, v)
        return self.o(out.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    def __init__(self, h: int, f: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(h, f), nn.Linear(f, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class GPTLayer(nn.Module):
    def __init__(self, h: int, f: int, n: int, kind: str) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.attn, self.mlp = Attention(h, n, kind), MLP(h, f)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__()
        h, n = config["n_embd"], config["n_head"]
        self.wte, self.wpe = nn.Embedding(config["vocab_size"], h), nn.Embedding(config["n_positions"], h)
        self.layers = nn.ModuleList(GPTLayer(h, config.get("n_inner") or 4 * h, n, kind) for _ in range(config["n_layer"]))
        self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, config["vocab_size"], bias=False)
        if config.get("tie_word_embeddings", True):
            self.head.weight = self.wte.weight

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(positions)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(ids, positions))


class HF(nn.Module):
    """A transformers model with the same face."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.m = model

    @property
    def layers(self) -> nn.ModuleList:
        return self.m.model.layers

    @property
    def head(self) -> nn.Linear:
        return self.m.lm_head

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.m.model(input_ids=ids, position_ids=positions, use_cache=False, attention_mask=None).last_hidden_state

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.m(input_ids=ids, position_ids=positions, use_cache=False, attention_mask=None).logits


def build(config: Mapping[str, Any], kind: str) -> Any:
    """The model of a ``config.json``'s keys with parameters in torch's default type, attention by the kernel `kind`."""
    config = dict(config)
    if config["model_type"] == "gpt2":
        return GPT(config, kind)
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("by_kernel", hf_attention)
    for key in ("architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "attn_implementation"):
        config.pop(key, None)
    made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    made._attn_implementation = "by_kernel"
    made.kernel = kind
    return HF(transformers.AutoModelForCausalLM.from_config(made, attn_implementation="by_kernel"))


class LoRA(nn.Module):
    """base(x) + B(A(x)) * scale, adapters in the type of the base."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        dtype = base.weight.dtype
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        return y + self.lora_B(self.lora_A(x)) * 2.0


GPT_NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "up": "up_proj", "down": "down_proj"}


def add_adapters(model: Any, targets: list[str], rank: int) -> None:
    for p in model.parameters():
        p.requires_grad_(False)
    for layer in model.layers:
        for module in list(layer.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and (name in targets or GPT_NAMES.get(name) in targets):
                    setattr(module, name, LoRA(child, rank))


class Several(nn.Module):
    """Layers that one checkpoint spans."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for layer in self.inner:
            x = layer(x, **kwargs)
        return x


def every_second_product() -> Any:
    """torchtitan's op-selective checkpoint: attention, reduce-scatters and every second ``mm`` are kept."""
    calls: dict[bool, int] = collections.defaultdict(int)
    aten, functional = torch.ops.aten, torch.ops._c10d_functional
    kept = {
        aten.mm.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        functional.reduce_scatter_tensor.default,
    }

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func == aten.mm.default:
            calls[ctx.is_recompute] += 1
            if calls[ctx.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if func in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def add_checkpoints(model: Any, strategy: dict[str, Any]) -> list[nn.Module]:
    """Recomputation as the plan says; returns the layers that FSDP2 wraps."""
    layers, recompute = model.layers, strategy["recompute"]
    plain = list(layers)
    every = strategy.get("recompute_every", 1)
    if recompute == "full" and every > 1:
        groups = [checkpoint_wrapper(Several(plain[i : i + every])) for i in range(0, len(plain), every)]
        del layers[:]
        layers.extend(groups)
    elif recompute == "full":
        for i, layer in enumerate(plain):
            layers[i] = checkpoint_wrapper(layer)
    elif recompute == "selective" and strategy.get("recompute_modules"):
        for layer in plain:
            if hasattr(layer, "attn"):
                layer.attn.core = checkpoint_wrapper(layer.attn.core)
            else:
                layer.self_attn.config.checkpoint_core = True
    elif recompute == "selective":
        for i, layer in enumerate(plain):
            layers[i] = checkpoint_wrapper(layer, context_fn=every_second_product)
    return plain if every > 1 else list(layers)


def split_over(model: Any, mesh: Any, *, sequence: bool, vocabulary: bool) -> None:
    """DTensor's tensor parallelism as torchtitan writes it; `vocabulary`: logits stay split."""
    gpt = isinstance(model, GPT)
    out = Shard(1) if sequence else Replicate()
    table = RowwiseParallel(input_layouts=Replicate(), output_layouts=out)
    head = ColwiseParallel(input_layouts=out, output_layouts=Shard(-1) if vocabulary else Replicate(), use_local_output=not vocabulary)
    names = ("wte", "norm", "head") if gpt else ("model.embed_tokens", "model.norm", "lm_head")
    plan: dict[str, Any] = {names[0]: table, names[2]: head}
    if sequence:
        plan[names[1]] = SequenceParallel()
        if gpt:
            plan["wpe"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=out)
    whole_model = model if gpt else model.m
    table_of, head_of = whole_model.get_submodule(names[0]), whole_model.get_submodule(names[2])
    tied = table_of.weight is head_of.weight
    parallelize_module(whole_model, mesh, plan)
    if tied:  # each got a copy of its own
        head_of.weight = table_of.weight
    column = "attn.q attn.k attn.v mlp.up" if gpt else "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj"
    row = "attn.o mlp.down" if gpt else "self_attn.o_proj mlp.down_proj"
    for layer in model.layers:
        inner: dict[str, Any] = {name: ColwiseParallel() for name in column.split()}
        inner |= {name: RowwiseParallel(output_layouts=out) for name in row.split()}
        if sequence:
            norms = ("ln1", "ln2") if gpt else ("input_layernorm", "post_attention_layernorm")
            inner |= {name: SequenceParallel() for name in norms}
            whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            named = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
            )
            inner |= {"mlp": whole, "attn" if gpt else "self_attn": whole if gpt else named}
        parallelize_module(layer, mesh, inner)
