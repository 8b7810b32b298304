"""A model from a bare size such as ``7B``: a Llama of that many parameters, by a rule.

1. Vocabulary: 32,000 below 4 billion, 128,256 from there (Llama 2 and Llama 3); tied embeddings below 2 billion (Llama 3.2, SmolLM).
2. Width and depth: hidden / layers is 64 up to 200 million and grows with the logarithm of the size to 112 at 5 billion, between GPT-3's 128
   (175B: 12288 / 96) and Llama 3's 102 (70B: 8192 / 80). Hidden is a multiple of 128 below 200 million, 512 below 2 billion, 1,024 below
   100 billion, 2,048 above; layers are even.
3. Heads of 128 (64 below 2 billion), so that 8 divides them from 200 million on; 8 key-value heads where there are at least 16 heads.
4. What remains goes to the gated MLP: a multiple of 256 nearest to the size asked for, between 2 and 5 times hidden (Llama 3: 3.5).

The total is within 3 % of what was asked from 100 million on and within 6 % from 10 million (tested over the whole range); the note of the
model says by how much it differs.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..errors import SpecError
from ..spec.model import ModelSpec
from ..units import parse_count
from .llama import build

SIZE = r"(?i)\s*[0-9][0-9_.,]*\s*[kmbt]\s*"
SMALLEST, LARGEST = 10**7, 10**14
MAX_POSITIONS = 8192


def shape_of_size(parameters: float) -> dict[str, int | bool | str]:
    """The configuration of the rule above, in Llama's own keys."""
    vocab = 128256 if parameters >= 4e9 else 32000
    tied = parameters < 2e9
    grain = 128 if parameters < 2e8 else 512 if parameters < 2e9 else 1024 if parameters < 1e11 else 2048
    log = math.log(parameters / 2e8) / math.log(5e9 / 2e8)
    ratio = 64 + 48 * min(max(log, 0.0), 1.0)
    # Twelve and a half hidden^2 a layer: attention 2 to 4, MLP 3 x 3.5.
    wanted = (ratio * parameters / 12.5) ** (1 / 3)
    wanted = (ratio * max(parameters - (1 if tied else 2) * vocab * wanted, parameters / 4) / 12.5) ** (1 / 3)
    widths = {max(grain, round(wanted / grain) * grain + step * grain) for step in (-1, 0, 1)}

    def miss(width: int) -> float:
        return abs(_fill(parameters, width, vocab, tied)[0] / parameters - 1) + 0.3 * abs(math.log(width / wanted))

    return _fill(parameters, min(sorted(widths), key=miss), vocab, tied)[1]


def _fill(parameters: float, hidden: int, vocab: int, tied: bool) -> tuple[int, dict[str, int | bool | str]]:
    head_dim = 64 if parameters < 2e9 else 128
    heads = hidden // head_dim
    kv_heads = 8 if heads >= 16 and heads % 8 == 0 else heads
    ends = vocab * hidden * (1 if tied else 2) + hidden
    attention = 2 * hidden * hidden + 2 * hidden * kv_heads * head_dim + 2 * hidden
    budget = max(parameters - ends, 0.0)
    layers = max(2, 2 * round(budget / (attention + 10.5 * hidden * hidden) / 2))
    room = (budget / layers - attention) / (3 * hidden)
    ffn = 256 * min(max(round(room / 256), math.ceil(2 * hidden / 256)), max(1, 5 * hidden // 256))
    total = ends + layers * (attention + 3 * hidden * ffn)
    config: dict[str, int | bool | str] = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": tied,
    }
    return total, config


def model_of_size(text: str) -> ModelSpec:
    """``7B``, ``70b``, ``1.5T`` -> a Llama of about that size, named after it; the note says what it came to.

    Raises `SpecError` below 10 million and above 100 trillion parameters.
    """
    wanted = parse_count(text, "model")
    if not SMALLEST <= wanted <= LARGEST:
        raise SpecError(f"{text.strip()[:40]} is not between 10M and 100T parameters", "model", ["10M" if wanted < SMALLEST else "100T"])
    model = build(shape_of_size(wanted), f"llama-like-{text.strip().upper()}")
    share = model.parameters / wanted - 1
    note = (
        f"shape by rule for {text.strip().upper()}: {model.num_layers} layers of {model.hidden}, {model.parameters:,} parameters "
        f"({share:+.1%} of what was asked)"
    )
    return replace(model, notes=(note, *model.notes))
