"""Which products LoRA adapts: the names that people write, as the rows of a model's blocks.

Checkpoints name the same product differently (``q_proj``, ``query``), join products that the blocks keep apart (``query_key_value``), or split one in
two (``q_a_proj``, ``q_b_proj``). PEFT's names mean the same here: https://github.com/huggingface/peft, src/peft/utils/constants.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import SpecError, unknown
from ..spec.model import ModelSpec

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = "all-linear"  # PEFT's word for every product but the head
SAME = {
    "q_proj": ("query", "q_a_proj", "q_b_proj"),
    "k_proj": ("key", "kv_a_proj_with_mqa", "kv_b_proj"),
    "v_proj": ("value", "kv_a_proj_with_mqa", "kv_b_proj"),
    "o_proj": ("dense", "out_proj"),
    "gate_proj": (),
    "up_proj": ("fc1", "fc_in", "c_fc", "dense_h_to_4h"),
    "down_proj": ("fc2", "fc_out", "c_proj", "dense_4h_to_h"),
    "c_attn": ("q_proj", "k_proj", "v_proj"),
    "query_key_value": ("query", "key", "value"),
    "Wqkv": ("query", "key", "value"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "c_fc": ("up_proj",),
    "c_proj": ("o_proj", "down_proj"),
}


def lora_targets(model: ModelSpec, said: Sequence[str] | None) -> tuple[str, ...]:
    """The rows of `model` that `said` names, in the order of its blocks; None is the attention's products.

    A name that this model has no product for is skipped as PEFT does (``gate_proj`` of an MLP without a gate); `SpecError` for a word that names no
    product of any model, and where nothing is left.
    """
    rows = list(dict.fromkeys(o.name for b, _ in model.counts for o in b.ops if o.kind in ("linear", "grouped_linear") and o.weights))
    wanted: set[str] = set()
    for name in ATTENTION if said is None else said:
        if name == EVERY:
            wanted |= set(rows)
        elif name in rows:
            wanted.add(name)
        elif name in SAME:
            wanted |= set(SAME[name])
        elif not any(name in names for names in SAME.values()):
            raise unknown("product", name, [*rows, EVERY], "training.lora_targets")
    found = tuple(r for r in rows if r in wanted)
    if not found:
        raise SpecError("names no product of this model", "training.lora_targets", [*rows, EVERY])
    return found
