"""K13: sequence length against positions, data, the file's own name, and keys that no longer set it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..findings import Check, Example, Finding
from ..setup import Setup
from ..view import View, whole
from ._tools import ERROR, NOTE, WARNING, about, put, rename, said
from .names import catalogued

NAMED = re.compile(r"(?:seq|len|ctx|context)[_-]?(\d+)k|(?<![a-z0-9])(\d+)k[_-]?(?:seq|ctx|context)", re.IGNORECASE)


def lengths(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen():
        yield from _two_lengths(view)
        yield from _renamed(view)
        yield from _by_name(view)
    yield from _positions(setup)


def _positions(setup: Setup) -> Iterator[Finding]:
    fact, most = setup.fact("training.seq_len"), setup.fact("model.max_position_embeddings")
    length, positions = whole(fact.value) if fact else None, whole(most.value) if most else None
    if fact and length and most and positions and length > positions:
        rotary = _rotary(setup)
        yield about(
            fact, "K13", WARNING if rotary else ERROR,
            f"Sequences of {length} tokens on {positions} positions ({most.place})" + (": rotary angles beyond them were never "
            "trained." if rotary else ": the last ones have no embedding."),
            f"Set max_position_embeddings to {length}, or shorten the sequences.",
        )  # fmt: skip
        return
    name = setup.value("model.name")
    published = catalogued(name) if isinstance(name, str) and fact and length and not most else None
    if fact and length and published is not None and published.max_positions and length > published.max_positions and not _scaled(setup):
        yield about(
            fact, "K13", WARNING, f"Sequences of {length} tokens; {published.name} was trained on {published.max_positions} positions.",
            "Scale the rotary base (rope_scaling), or shorten the sequences.",
        )  # fmt: skip


def _rotary(setup: Setup) -> bool:
    kinds = {str(v.value("position_embedding_type", "pos_emb", "position_embeddings_type") or "").lower() for v in setup.views}
    if kinds & {"rope", "rotary", "alibi", "none", "yarn"}:
        return True
    return any(v.format in ("nanotron", "automodel", "trainer", "trl", "axolotl", "llama_factory") for v in setup.views) and not kinds & {
        "learned",
        "learned_absolute",
    }


def _scaled(setup: Setup) -> bool:
    return any(v.value("rope_scaling", "rope_theta", "rotary_base", "rope_type") not in (None, "", "null") for v in setup.views)


def _two_lengths(view: View) -> Iterator[Finding]:
    """The data's length against the model's, in one file."""
    data = view.get("data.seq_length", "data.max_seq_length", "dataset.seq_length", "dataset.max_seq_length")
    model = view.get("encoder_seq_length", "max_position_embeddings")
    length, most = (whole(k.value) if k else None for k in (data, model))
    if data and model and length and most and length > most:
        yield said(
            view, data, "K13", ERROR, f"The data holds {length} tokens a sample, the model {most} ({model.path[-1]}).", f"Set {model.path[-1]} to {length}.",
            put(view, model, length),
        )  # fmt: skip


def _renamed(view: View) -> Iterator[Finding]:
    """TRL calls it max_length; a Trainer's own script may keep the old name."""
    key = view.get("max_seq_length")
    if key is None or view.format not in ("trl", "trainer") or view.get("max_length") is not None:
        return
    sure = view.document.syntax in ("yaml", "json") and (
        view.get("dataset_name", "dataset_mixer", "dataset_mixture", "dataset_configs", "packing", "dataset_num_proc") is not None
    )
    if sure:
        yield said(
            view, key, "K13", WARNING, f"max_seq_length {key.value} is not read by TRL since 0.20: samples are cut at max_length, 1024 by "
                f"default.", "Call it max_length.",
            rename(view, key, "max_length"),
        )  # fmt: skip


def _by_name(view: View) -> Iterator[Finding]:
    """A file whose name promises a length."""
    hit = NAMED.search(view.document.name.rsplit("/", 1)[-1])
    key = view.get("sequence_len", "cutoff_len", "seq_length", "max_seq_len", "seq_len", "sequence_length", "max_length", "max_seq_length")
    length = whole(key.value) if key else None
    if hit and key and length:
        promised = int(hit.group(1) or hit.group(2)) * 1024
        if length not in (promised, promised * 1000 // 1024) and abs(length / promised - 1) > 0.1:
            yield said(
                view,
                key,
                "K13",
                WARNING if length < promised else NOTE,
                f"The file is named for {promised} tokens and trains on {length}.",
                f"Set it to {promised}.",
                put(view, key, promised),
            )


CHECK = Check(
    "K13", "sequence length against positions, data and name", lengths,
    Example({"train.sh": "#!/bin/bash\ntorchrun --nproc_per_node 8 pretrain_gpt.py \\\n  --num-layers 24 --hidden-size 1024 "
        "--num-attention-heads 16 \\\n  --seq-length 4096 --max-position-embeddings 2048 \\\n"
             "  --micro-batch-size 1 --global-batch-size 64 --lr 1e-4 --train-iters 1000 --bf16\n"}),
    "error where positions are learned or the data is longer than the model; warning where they are rotary or a key is no longer read",
    "longer sequences with scaled rotary positions",
)  # fmt: skip
