"""Each family against a formula written by hand: parameters of a small model, and what sets the family's rows apart.

Letters: h hidden, f feed-forward, n heads, k key-value heads, d head size, V vocabulary, L layers, P positions, E experts, e their width.
"""

from __future__ import annotations

from typing import Any

import pytest

from trainwright.models import FAMILIES, build_model
from trainwright.spec.model import ModelSpec

H, F, N, K, D, V, L, P, E, W, T = 64, 160, 8, 2, 16, 1000, 6, 128, 12, 24, 3
COMMON = {
    "hidden_size": H,
    "intermediate_size": F,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": D,
    "vocab_size": V,
    "num_hidden_layers": L,
    "max_position_embeddings": P,
    "tie_word_embeddings": False,
}
GQA = 2 * H * N * D + 2 * H * K * D  # q and o, k and v
MHA = 4 * H * H
GATED = 3 * H * F
ENDS = 2 * V * H
RMS = H
LN = 2 * H  # weight and bias
ROUTED = E * 3 * H * W + E * H


def table(model_type: str, **keys: Any) -> dict[str, Any]:
    """The common keys, without those given as None."""
    return {"model_type": model_type, **{k: v for k, v in {**COMMON, **keys}.items() if v is not None}}


MOE = {"num_experts": E, "num_experts_per_tok": T, "moe_intermediate_size": W}
LOCAL = {"num_local_experts": E, "num_experts_per_tok": T}
NO_HEAD_DIM = {"head_dim": None}
PLAIN_D = H // N  # head size where it is not given apart
GQA_PLAIN = 2 * H * H + 2 * H * K * PLAIN_D
MLA_KEYS = {
    "num_key_value_heads": N, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_routed_experts": E, "num_experts_per_tok": T, "moe_intermediate_size": W, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
MLA_KV = H * (16 + 4) + 16 + 16 * N * (8 + 6) + N * 6 * H
MLA = H * 24 + 24 + 24 * N * (8 + 4) + MLA_KV
MLA_MOE = ROUTED + 2 * 3 * H * W
DEEPSEEK = ENDS + RMS + L * (MLA + 2 * RMS) + GATED + (L - 1) * MLA_MOE
GPT_BLOCK = MHA + 4 * H + 8 * H * H + 5 * H  # four biased projections, an MLP of 4h with biases
SPARSE2 = L // 2  # layers with experts where every second one has them
DELTA = H * (2 * 4 * 8 + 2 * 8 * 8) + H * 2 * 8 + (2 * 4 * 8 + 8 * 8) * 4 + 8 + 8 + 8 + 8 * 8 * H

CASES: list[tuple[str, dict[str, Any], int]] = [
    ("llama", table("llama"), ENDS + RMS + L * (GQA + GATED + 2 * RMS)),
    ("llama", table("llama", attention_bias=True, mlp_bias=True), ENDS + RMS + L * (GQA + GATED + 2 * RMS + N * D + 2 * K * D + H + 2 * F + H)),
    ("llama", table("llama", tie_word_embeddings=True), V * H + RMS + L * (GQA + GATED + 2 * RMS)),
    ("granite", table("granite"), ENDS + RMS + L * (GQA + GATED + 2 * RMS)),
    ("mistral", table("mistral", sliding_window=32), ENDS + RMS + L * (GQA + GATED + 2 * RMS)),
    ("qwen2", table("qwen2"), ENDS + RMS + L * (GQA + GATED + 2 * RMS + N * D + 2 * K * D)),
    ("qwen3", table("qwen3"), ENDS + RMS + L * (GQA + GATED + 2 * RMS + 2 * D)),
    ("smollm3", table("smollm3"), ENDS + RMS + L * (GQA + GATED + 2 * RMS)),
    ("gemma", table("gemma"), ENDS + RMS + L * (GQA + GATED + 2 * RMS)),
    ("gemma2", table("gemma2"), ENDS + RMS + L * (GQA + GATED + 4 * RMS)),
    ("gemma3", table("gemma3_text"), ENDS + RMS + L * (GQA + GATED + 4 * RMS + 2 * D)),
    ("phi3", table("phi3", **NO_HEAD_DIM), ENDS + RMS + L * (GQA_PLAIN + GATED + 2 * RMS)),
    ("olmo", table("olmo"), ENDS + L * (GQA + GATED)),
    ("olmo2", table("olmo2"), ENDS + RMS + L * (GQA + GATED + 2 * RMS + N * D + K * D)),
    ("olmo3", table("olmo3"), ENDS + RMS + L * (GQA + GATED + 2 * RMS + N * D + K * D)),
    ("apertus", table("apertus"), ENDS + RMS + L * (GQA + 2 * H * F + 2 + 2 * RMS + 2 * D)),
    ("nemotron", table("nemotron"), ENDS + LN + L * (GQA + 2 * H * F + 2 * LN)),
    ("stablelm", table("stablelm"), ENDS + LN + L * (GQA + GATED + 2 * LN)),
    ("stablelm", table("stablelm", use_qkv_bias=True, use_parallel_residual=True), ENDS + LN + L * (GQA + GATED + LN + N * D + 2 * K * D)),
    ("stablelm", table("stablelm", qk_layernorm=True), ENDS + LN + L * (GQA + GATED + 2 * LN + N * D + K * D)),
    ("starcoder2", table("starcoder2"), ENDS + LN + L * (GQA + 2 * H * F + 2 * LN + N * D + 2 * K * D + H + F + H)),
    ("phi", table("phi", **NO_HEAD_DIM), ENDS + V + LN + L * (GQA_PLAIN + 2 * H * F + LN + H + 2 * K * PLAIN_D + H + F + H)),
    ("gptj", {"model_type": "gptj", "n_embd": H, "n_layer": L, "n_head": N, "vocab_size": V}, ENDS + V + LN + L * (MHA + 8 * H * H + 5 * H + LN)),
    ("gpt2", {"model_type": "gpt2", "n_embd": H, "n_layer": L, "n_head": N, "n_positions": P, "vocab_size": V}, V * H + P * H + LN + L * (GPT_BLOCK + 2 * LN)),
    ("gpt_neox", table("gpt_neox", num_key_value_heads=None, head_dim=None), ENDS + LN + L * (MHA + 4 * H + 2 * H * F + F + H + 2 * LN)),
    ("bloom", {"model_type": "bloom", "hidden_size": H, "n_layer": L, "n_head": N, "vocab_size": V}, V * H + LN + LN + L * (GPT_BLOCK + 2 * LN)),
    ("mpt", {"model_type": "mpt", "d_model": H, "n_layers": L, "n_heads": N, "vocab_size": V}, V * H + H + L * (MHA + 8 * H * H + 2 * H)),
    (
        "opt",
        {"model_type": "opt", "hidden_size": H, "num_hidden_layers": L, "num_attention_heads": N, "ffn_dim": F, "vocab_size": V, "max_position_embeddings": P},
        V * H + (P + 2) * H + LN + L * (MHA + 4 * H + 2 * H * F + F + H + 2 * LN),
    ),
    (
        "opt",  # half-width embeddings, norms afterwards and so none at the end: the 350M
        {
            "model_type": "opt", "hidden_size": H, "num_hidden_layers": L, "num_attention_heads": N, "ffn_dim": F, "vocab_size": V,
            "max_position_embeddings": P, "word_embed_proj_dim": H // 2, "do_layer_norm_before": False,
        },
        V * H // 2 + (P + 2) * H + H * H + L * (MHA + 4 * H + 2 * H * F + F + H + 2 * LN),
    ),
    ("falcon", {"model_type": "falcon", "hidden_size": H, "num_hidden_layers": L, "num_attention_heads": N, "vocab_size": V},
     V * H + LN + L * (2 * H * H + 2 * H * PLAIN_D + 8 * H * H + LN)),
    ("falcon", {"model_type": "falcon", "hidden_size": H, "num_hidden_layers": L, "num_attention_heads": N, "vocab_size": V, "num_kv_heads": K,
                "new_decoder_architecture": True}, V * H + LN + L * (GQA_PLAIN + 8 * H * H + 2 * LN)),
    ("mixtral", table("mixtral", **LOCAL), ENDS + RMS + L * (GQA + E * GATED + E * H + 2 * RMS)),
    ("phimoe", table("phimoe", **LOCAL, attention_bias=True, lm_head_bias=True),
     ENDS + V + LN + L * (GQA + N * D + 2 * K * D + H + E * GATED + E * H + 2 * LN)),
    ("olmoe", table("olmoe", num_experts=E, num_experts_per_tok=T), ENDS + RMS + L * (GQA + N * D + K * D + E * GATED + E * H + 2 * RMS)),
    ("minimax_m2", table("minimax_m2", **LOCAL), ENDS + RMS + L * (GQA + N * D + K * D + E * GATED + E * H + 2 * RMS)),
    ("gpt_oss", table("gpt_oss", **LOCAL),
     ENDS + RMS + L * (GQA + N * D + 2 * K * D + H + N + E * GATED + E * (2 * F + H) + E * H + E + 2 * RMS)),
    ("qwen2_moe", table("qwen2_moe", **MOE, shared_expert_intermediate_size=40),
     ENDS + RMS + L * (GQA + N * D + 2 * K * D + ROUTED + 3 * H * 40 + H + 2 * RMS)),
    ("qwen3_moe", table("qwen3_moe", **MOE, decoder_sparse_step=2),
     ENDS + RMS + L * (GQA + 2 * D + 2 * RMS) + SPARSE2 * (ROUTED + GATED)),
    ("qwen3_next", table("qwen3_next", **MOE, shared_expert_intermediate_size=40, full_attention_interval=3, linear_num_key_heads=4,
                         linear_num_value_heads=8, linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=4),
     ENDS + RMS + L * (ROUTED + 3 * H * 40 + H + 2 * RMS) + 2 * (GQA + H * N * D + 2 * D) + 4 * DELTA),
    ("llama4", table("llama4_text", **LOCAL, intermediate_size=W, intermediate_size_mlp=F, interleave_moe_layer_step=2),
     ENDS + RMS + L * (GQA + 2 * RMS) + SPARSE2 * (ROUTED + 3 * H * W + GATED)),
    ("glm4_moe", table("glm4_moe", n_routed_experts=E, num_experts_per_tok=T, moe_intermediate_size=W, n_shared_experts=1, first_k_dense_replace=2,
                       attention_bias=True, use_qk_norm=True),
     ENDS + RMS + L * (GQA + N * D + 2 * K * D + 2 * D + 2 * RMS) + 2 * GATED + (L - 2) * (ROUTED + 3 * H * W)),
    ("deepseek_v3", table("deepseek_v3", **MLA_KEYS), DEEPSEEK),
    ("kimi_k2", table("kimi_k2", **MLA_KEYS), DEEPSEEK),
    ("deepseek_v2", table("deepseek_v2", **MLA_KEYS), DEEPSEEK),
    ("deepseek_v2", table("deepseek_v2", **{**MLA_KEYS, "q_lora_rank": None}) | {"q_lora_rank": None},
     DEEPSEEK - L * (H * 24 + 24 + 24 * N * 12) + L * H * N * 12),
]  # fmt: skip


def ident(case: tuple[str, dict[str, Any], int]) -> str:
    return case[0]


@pytest.mark.parametrize("case", CASES, ids=ident)
def test_parameters_by_hand(case: tuple[str, dict[str, Any], int]) -> None:
    family, config, expected = case
    model = build_model(config, "small")
    assert model.family == family
    assert model.parameters == expected


def test_every_family_has_a_formula() -> None:
    assert {case[0] for case in CASES} == set(FAMILIES)


def small(family: str, **keys: Any) -> ModelSpec:
    return build_model({**next(c for f, c, _ in CASES if f == family), **keys}, "small")


def windows(model: ModelSpec) -> list[int | None]:
    return [op.window for name in model.layers for op in model.blocks[name].rows("attention")]


def test_where_windows_lie() -> None:
    assert windows(small("gemma2", sliding_window=32)) == [32, None] * 3
    assert windows(small("gemma3", sliding_window=32)) == [32] * 5 + [None]
    assert windows(small("olmo3", sliding_window=32)) == [32, 32, 32, None, 32, 32]
    assert windows(small("gpt_oss", sliding_window=32)) == [32, None] * 3
    assert windows(small("mistral", sliding_window=32)) == [32] * 6
    assert windows(small("mistral", sliding_window=None)) == [None] * 6
    assert windows(build_model(table("mistral"))) == [4096] * 6  # what the class assumes where the key is left out
    assert windows(small("qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=4)) == [None] * 4 + [32] * 2
    assert windows(small("qwen2", use_sliding_window=False, sliding_window=32, max_window_layers=0)) == [None] * 6
    assert windows(small("llama4", attention_chunk_size=32)) == [32, 32, 32, None, 32, 32]
    assert windows(small("gemma2", sliding_window=32, layer_types=["full_attention"] * 6)) == [None] * 6


def test_which_layers_have_rotary_positions() -> None:
    def rotary(model: ModelSpec) -> list[bool]:
        return [bool(model.blocks[name].rows("rope")) for name in model.layers]

    assert rotary(small("smollm3")) == [True, True, True, False, True, True]
    assert rotary(small("smollm3", no_rope_layers=[0, 1, 1, 1, 1, 0])) == [False, True, True, True, True, False]
    assert rotary(small("llama4")) == [True, True, True, False, True, True]
    assert not any(rotary(small(f))[0] for f in ("gpt2", "bloom", "mpt", "opt"))


def test_which_layers_have_experts() -> None:
    def sparse(model: ModelSpec) -> str:
        return "".join("x" if "moe" in model.blocks[name].tags else "." for name in model.layers)

    assert sparse(small("mixtral")) == "xxxxxx"
    assert sparse(small("deepseek_v3")) == ".xxxxx"
    assert sparse(small("glm4_moe")) == "..xxxx"
    assert sparse(small("deepseek_v2", moe_layer_freq=2)) == "..x.x."
    assert sparse(small("llama4")) == ".x.x.x"
    assert sparse(small("llama4", moe_layers=[0, 5])) == "x....x"
    assert sparse(small("qwen3_moe")) == ".x.x.x"
    assert sparse(small("qwen3_moe", mlp_only_layers=[1])) == "...x.x"


def test_a_shared_expert_of_width_zero_is_none() -> None:
    shared, none = small("qwen2_moe"), small("qwen2_moe", shared_expert_intermediate_size=0)
    assert shared.parameters - none.parameters == L * (3 * H * 40 + H)


def test_hybrid_layers_alternate() -> None:
    model = small("qwen3_next")
    mixers = ["attention" if model.blocks[name].rows("attention") else "delta" for name in model.layers]
    assert mixers == ["delta", "delta", "attention"] * 2
    (row,) = model.blocks[model.layers[0]].rows("linear_attention")
    assert (row.heads, row.kv_heads, row.head_dim, row.v_head_dim) == (8, 4, 8, 8)


def test_latent_attention_multiplies_wide_heads_and_narrow_values() -> None:
    (row,) = small("deepseek_v3").blocks["layer_moe"].rows("attention")
    assert (row.heads, row.head_dim, row.v_head_dim, row.width) == (N, 12, 6, N * 6)


def test_multi_token_prediction_is_counted_apart() -> None:
    without, one, two = (small("deepseek_v3", num_nextn_predict_layers=n) for n in (0, 1, 2))
    layer = one.blocks["layer_moe"].parameters
    assert without.parameters == one.parameters == two.parameters
    assert without.mtp_parameters == 0
    assert one.mtp_parameters == layer + 2 * H * H + 3 * H
    assert two.mtp_parameters == 2 * one.mtp_parameters


def test_router_biases_are_buffers() -> None:
    assert small("deepseek_v3").router_bias_elements == (L - 1) * E
    assert small("deepseek_v2").router_bias_elements == 0
    assert small("minimax_m2").router_bias_elements == L * E


def test_parallel_layers_read_the_same_norm() -> None:
    one = small("gptj").blocks["layer"]
    two = small("gpt_neox").blocks["layer"]
    assert len(one.rows("norm")) == 1
    assert len(two.rows("norm")) == 2
    assert [op.inputs for op in two.rows("norm")] == [("x",), ("x",)]
    assert small("gpt_neox", use_parallel_residual=False).blocks["layer"].rows("norm")[1].inputs == ("x1",)


def test_squared_relu_has_no_gate() -> None:
    layer = small("nemotron").blocks["layer"]
    assert [op.function for op in layer.rows("activation")] == ["relu2"]
    assert not layer.rows("multiply")


def test_a_multimodal_configuration_is_read_as_its_language_model() -> None:
    inner = {k: v for k, v in table("gemma3_text").items() if k not in ("model_type", "tie_word_embeddings")}
    outer = build_model(
        {"model_type": "gemma3", "text_config": inner, "vision_config": {"hidden_size": 1152}, "tie_word_embeddings": False}, "g"
    )
    assert outer.parameters == small("gemma3").parameters
    assert "text part only" in outer.notes[0]
    assert build_model({"model_type": "anything", "text_config": table("llama")}, "v").family == "llama"


def test_what_a_configuration_leaves_out_is_named() -> None:
    """The file of Gemma-3-4B leaves heads, head size and vocabulary to the class."""
    config = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    model = build_model(config, "gemma-3-4b")
    assert model.parameters == 3880263168
    assert "num_attention_heads = 8" in model.notes[0]
    assert "vocab_size = 262208" in model.notes[0]
