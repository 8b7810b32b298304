"""What an engine would silently take otherwise is said in the set's README."""

from __future__ import annotations

import ast

import pytest

import trainwright as tw
from trainwright.api import emit

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "vocab_size": 1024,
}
RUN = {"cluster": "8xH100", "training": {"seq_len": 512, "global_batch_size": 8}, "strategy": {"framework": "megatron"}}


def test_megatron_is_told_which_rotary_base_it_takes() -> None:
    silent = emit({**RUN, "model": CONFIG}, "megatron")
    said = emit({**RUN, "model": {**CONFIG, "rope_theta": 500000.0}}, "megatron")
    assert "--rotary-base" in silent["README.md"]
    assert "Note: the configuration names no rope_theta" not in said["README.md"]
    assert any("--rotary-base 500000" in text for text in said.values())


def test_a_model_without_rotary_positions_needs_no_such_note() -> None:
    gpt = {"model_type": "gpt2", "n_embd": 256, "n_head": 4, "n_layer": 4, "n_positions": 512}
    assert "rope_theta" not in emit({**RUN, "model": gpt}, "megatron")["README.md"]
    assert tw.estimate({**RUN, "model": gpt}).fits


MIXTURE = {**CONFIG, "model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("target", ["accelerate", "trainer"])
def test_experts_fewer_than_shards_are_cut_between_them_where_files_cannot_say_otherwise(target: str) -> None:
    def note(sharding: str, experts: int) -> bool:
        run = {**RUN, "model": {**MIXTURE, "num_local_experts": experts}, "strategy": {"framework": "fsdp2", "sharding": sharding}}
        return f"of 8 shards {experts} hold a whole expert" in emit(run, target)["README.md"]

    assert note("zero3", 4)
    assert not note("zero3", 8)  # one each


def test_the_fsdp_script_cuts_within_experts_where_they_are_fewer_than_shards() -> None:
    """FSDP2's first dimension would leave four of eight ranks without any; every rank holds an eighth of each."""
    torch = pytest.importorskip("torch")
    files = emit({**RUN, "model": MIXTURE, "strategy": {"framework": "fsdp2", "sharding": "zero3"}}, "fsdp")
    assert "Note: FSDP2" not in files["README.md"]
    tree = ast.parse(files["train_fsdp.py"])
    (made,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "between_or_within")
    names = {"Shard": lambda dim: dim, "nn": torch.nn}
    exec(compile(ast.Module([made], []), "train_fsdp.py", "exec"), names)
    cut = names["between_or_within"](8)
    shapes = [(4, 1024, 256), (4, 12, 256), (8, 1024, 256), (1024, 256), (4, 3, 5)]
    assert [cut(torch.empty(s, device="meta")) for s in shapes] == [1, 2, None, None, None]
