"""What an engine would silently take otherwise is said in the set's README."""

from __future__ import annotations

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
