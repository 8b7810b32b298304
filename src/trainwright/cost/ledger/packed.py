"""Adapters around one product that makes queries, keys and values, as LitGPT runs them on one GPU.

Source: litgpt/lora.py (`LoRAQKVLinear`), litgpt/model.py, litgpt/utils.py (`chunked_cross_entropy`). Its own modules with torch 2.13 on fake tensors save
what these rules say; its published peaks of llama-2-7b are 1 % above.
"""

from __future__ import annotations

import numpy as np

from ...spec.blocks import Block
from ..table import Column
from .saved import Kernels, Saved, layouts, saved_by, targeted
from .scope import Scope

PRODUCTS = ("q_proj", "k_proj", "v_proj")


def runs_packed(scope: Scope) -> Column:
    """1.0 for plans of one rank of plain PyTorch with adapters on nothing but queries, keys and values, all in 16 bits and nothing recomputed: what
    `litgpt finetune_lora` does by default. 0.0 elsewhere."""
    job, s = scope.job, scope.structure
    fits = s.framework == "ddp" and s.recompute == "none" and s.attention == "flash" and not s.compile
    plain = job.method == "lora" and job.base_quantization is None and job.master_weights == "none" and job.precision == "bf16"
    if not (fits and plain and {*job.lora_targets} <= {*PRODUCTS} and scope.option("lora_dropout", 0.05) > 0):
        return np.zeros(len(scope))
    return ((scope.data_ranks == 1) & (scope.tp == 1) & (scope.pp == 1)).astype(np.float64)


def saved_packed(block: Block, kernels: Kernels) -> tuple[Saved, ...]:
    """Value heads are a view that keeps the whole product, unless groups are repeated for each head; what adapters make is written into zeros, which keeps
    it; they share one dropped copy of their input and its mask."""
    everything = saved_by(block, kernels)
    products = [op for op in block.rows("linear") if op.name in PRODUCTS]
    core = next((op for op in block.rows("attention")), None)
    if core is None or len(products) != len(PRODUCTS):
        return everything
    _, key, value = core.inputs
    row, c = block.ops.index(products[0]), kernels.c
    added: list[Saved] = []
    if 1 < core.kv_heads < core.heads:
        replaced = {key, value}
        added += [Saved(name, "heads", float(core.heads), core.head_dim * c, row, "attention") for name in (key, value)]
    else:
        replaced = {value}
        added.append(Saved("qkv", "tensor", float(sum(op.width for op in products)), c, row, "attention"))
    adapters = float(sum(op.width for op in products if targeted(op, kernels)))
    layout, width = layouts(block, kernels.rules)[products[0].inputs[0]]
    added.append(Saved("adapters:padded", "tensor", adapters, c, row, "attention"))
    added.append(Saved("adapters:mask", layout, float(width or products[0].k), 1, row, "attention"))
    return (*(s for s in everything if s.tensor not in replaced), *added)
