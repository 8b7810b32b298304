"""K21, K25: names that exist: wrap classes, policies, attention kernels, and a model that is the one the file speaks of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import nearest
from ..findings import Check, Example, Finding
from ..setup import Setup
from ..view import Value, View, truthy, whole
from ._tools import ERROR, HF, NOTE, WARNING, about, put, said

# Decoder layer by the model's name, longest word first; transformers' own class names (models/*/modeling_*.py).
WRAP: tuple[tuple[str, str], ...] = (
    ("qwen3_5_moe", "Qwen3_5MoeDecoderLayer"), ("qwen3-next", "Qwen3NextDecoderLayer"), ("qwen2-vl", "Qwen2VLDecoderLayer"),
    ("qwen2.5-vl", "Qwen2_5_VLDecoderLayer"), ("qwen3", "Qwen3DecoderLayer"), ("qwen2", "Qwen2DecoderLayer"), ("qwen1.5", "Qwen2DecoderLayer"),
    ("mixtral", "MixtralDecoderLayer"), ("mistral", "MistralDecoderLayer"), ("zephyr", "MistralDecoderLayer"), ("vicuna", "LlamaDecoderLayer"),
    ("llama", "LlamaDecoderLayer"), ("alpaca", "LlamaDecoderLayer"), ("tinyllama", "LlamaDecoderLayer"), ("gemma-3", "Gemma3DecoderLayer"),
    ("gemma-2", "Gemma2DecoderLayer"), ("gemma", "GemmaDecoderLayer"), ("mpt", "MPTBlock"), ("falcon", "FalconDecoderLayer"), ("opt-", "OPTDecoderLayer"),
    ("gpt-neox", "GPTNeoXLayer"), ("pythia", "GPTNeoXLayer"), ("gpt2", "GPT2Block"), ("gpt-j", "GPTJBlock"), ("bloom", "BloomBlock"), ("phi-3",
        "Phi3DecoderLayer"),
    ("phi-4", "Phi3DecoderLayer"), ("deepseek-v3", "DeepseekV3DecoderLayer"), ("gpt-oss", "GptOssDecoderLayer"), ("starcoder2", "Starcoder2DecoderLayer"),
    ("granite", "GraniteDecoderLayer"), ("olmo-2", "Olmo2DecoderLayer"),
)  # fmt: skip
# Other names that the same architecture goes by (remote code, versions).
SAME: Mapping[str, frozenset[str]] = {"MPTBlock": frozenset(("MptBlock",)), "FalconDecoderLayer": frozenset(("DecoderLayer",))}

# {key: (allowed values, formats)}: enumerations of the engines' own parsers.
ENUMS: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (("fsdp_auto_wrap_policy",), ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"), ("accelerate", "axolotl")),
    (("fsdp_backward_prefetch",), ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"), ("accelerate", "axolotl")),
    (("fsdp_state_dict_type",), ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"), ("accelerate", "axolotl")),
    (("fsdp_sharding_strategy",), ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"), ("accelerate", "axolotl", "llm_foundry")),
    (("distributed_type",), ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU",
        "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA",
                             "TPU", "MEGATRON_LM"), ("accelerate",)),
    (("mixed_precision",), ("no", "fp16", "bf16", "fp8"), ("accelerate",)),
    (("finetuning_type",), ("lora", "oft", "freeze", "full"), ("llama_factory",)),
    (("stage",), ("pt", "sft", "rm", "ppo", "dpo", "kto"), ("llama_factory",)),
    (("pp_engine",), ("1f1b", "afab"), ("nanotron",)),
    (("tp_mode",), ("ALL_REDUCE", "REDUCE_SCATTER"), ("nanotron",)),
    (("pipeline_parallel_schedule",), ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV",
        "PipelineScheduleSingle",
                                       "PipelineScheduleMulti"), ("torchtitan", "primus")),
    (("recompute_granularity",), ("full", "selective"), ("megatron",)),
    (("recompute_method",), ("uniform", "block"), ("megatron",)),
    (("activations_checkpoint_granularity",), ("full", "selective"), ("nemo",)),
    (("activations_checkpoint_method",), ("uniform", "block"), ("nemo",)),
    (("adapter",), ("lora", "qlora", "llama-adapter", "ia3"), ("axolotl",)),
)  # fmt: skip
EMPTY = ("", "none", "null", "auto")
ATTENTION = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
    "xformers",
    "sage",
    "s2",
    "fp8",
)
FACTORY_ATTENTION = ("auto", "disabled", "sdpa", "fa2", "fa3")
FACTORY_V1_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def names(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen():
        for keys, allowed, formats in ENUMS:
            if view.format in formats:
                yield from _enum(view, view.get(*keys), allowed)
        yield from _attention(view)
        yield from _wrap_class(setup, view)


def _enum(view: View, key: Value | None, allowed: tuple[str, ...]) -> Iterator[Finding]:
    if key is None or isinstance(key.value, (bool, int, float, dict, list)) or key.value is None:
        return
    text = str(key.value).strip()
    if (
        text.lower() in EMPTY
        or "$" in text
        or "{" in text
        or text.isdigit()
        or text.upper() in {a.upper() for a in allowed}
        or text == "???"
    ):
        return
    near = nearest(text, allowed) or [a for a in allowed if text.lower() in a.lower()]
    yield said(
        view, key, "K21", ERROR, f"{key.path[-1]} {text!r} does not exist; there are {', '.join(allowed)}.", f"Use {near[0]}." if near else "",
        *((put(view, key, near[0]),) if near else ()),
    )  # fmt: skip


def _attention(view: View) -> Iterator[Finding]:
    key = view.get("attn_implementation") if view.format != "llama_factory" else view.get("flash_attn")
    if key is None or not isinstance(key.value, str) or not key.value.strip() or "$" in key.value or "/" in key.value:
        return
    text = key.value.strip()
    if view.format == "llama_factory":
        newer = view.get("model") is not None and view.get("model_name_or_path") is None
        allowed: tuple[str, ...] = FACTORY_V1_ATTENTION if newer else FACTORY_ATTENTION
        alias = (
            {"fa2": "flash_attention_2", "fa3": "flash_attention_3"} if newer else {"flash_attention_2": "fa2", "flash_attention_3": "fa3"}
        )
    elif view.format in (*HF, "automodel", "nanotron"):
        allowed, alias = (
            ATTENTION,
            {
                "fa2": "flash_attention_2",
                "flash_attn": "flash_attention_2",
                "flash_attn_2": "flash_attention_2",
                "flash": "flash_attention_2",
            },
        )
    else:
        return
    if text in allowed or truthy(text) or text.lower() in ("false", "none", "null"):
        return
    near = [alias[text]] if text in alias else nearest(text, allowed)
    yield said(
        view, key, "K21", ERROR, f"{key.path[-1]} {text!r} does not exist; there are {', '.join(allowed)}.", f"Use {near[0]}." if near else "",
        *((put(view, key, near[0]),) if near else ()),
    )  # fmt: skip


def _wrap_class(setup: Setup, view: View) -> Iterator[Finding]:
    """The class that FSDP wraps against the model that is loaded."""
    key = view.get("fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls_to_wrap")
    named = _model_near(setup, view, key)
    if key is None or not isinstance(key.value, (str, list)) or not key.value or named is None:
        return
    classes = {c.strip().strip("'\"") for c in (key.value if isinstance(key.value, list) else key.value.split(","))}
    base = named.lower().rsplit("/", 1)[-1]
    right = next((c for word, c in WRAP if word in base), None)
    known = {c for _, c in WRAP}
    if right and right not in classes and not classes & SAME.get(right, frozenset()) and classes & known:
        yield said(
            view, key, "K21", ERROR, f"{', '.join(sorted(classes))} is not a layer of {named}: FSDP finds nothing to wrap and stops, or "
                f"keeps the whole model in one unit.",
            f"Use {right}.", put(view, key, right),
        )  # fmt: skip


def _model_near(setup: Setup, view: View, key: Value | None) -> str | None:
    """The model of the same command, or of the only other file."""
    own = [k for k in view.all("model_name_or_path", "base_model", "pretrained_model_name_or_path") if isinstance(k.value, str)]
    if own and key is not None:
        line = view.document.line(key.path) or 0
        return str(min(own, key=lambda k: abs((view.document.line(k.path) or 0) - line)).value)
    found = setup.value("model.name")
    return str(found) if isinstance(found, str) else None


def presets(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen():
        yield from _flavor(view)
        yield from _shape(setup, view)
    yield from _vocabulary(setup)


SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)\s*[bB](?![a-zA-Z0-9])")


def _sizes(text: str) -> list[float]:
    return [float(n) for n in SIZE.findall(text.replace("_", " ").replace("-", " "))]


def _flavor(view: View) -> Iterator[Finding]:
    """A preset of one size in a file that is named after another."""
    key = view.get("model.flavor", "flavor")
    if key is None or not isinstance(key.value, str) or view.document.syntax == "shell":
        return
    promised, given = _sizes(view.document.name.rsplit("/", 1)[-1].rsplit(".", 1)[0]), _sizes(key.value)
    if len(promised) == 1 and given and given[0] not in promised:
        yield said(
            view, key, "K25", WARNING, f"The file is called {view.document.name.rsplit('/', 1)[-1]} and trains the preset {key.value}.",
            f"Use the preset of {promised[0]:g}B.", put(view, key, f"{promised[0]:g}B"),
        )  # fmt: skip


def _shape(setup: Setup, view: View) -> Iterator[Finding]:
    """Keys of a config.json that the file states against the published model that it names."""
    name = setup.value("model.name")
    if not isinstance(name, str):
        return
    published = catalogued(name)
    if published is None:
        return
    for key, value in (("num_hidden_layers", published.num_layers), ("hidden_size", published.hidden), ("num_attention_heads", published.heads),
        ("num_key_value_heads", published.kv_heads),
                       ("num_experts", published.experts)):  # fmt: skip
        fact = setup.fact(f"model.{key}")
        number = whole(fact.value) if fact else None
        if fact and number and value and number != value and fact.place.file == view.document.name:
            shrunk = key == "num_hidden_layers" and number < value
            yield about(
                fact, "K25", NOTE if shrunk else WARNING, f"{key} is {number}; {published.name} as published has {value}." + (" Fewer layers "
                    "are a usual proxy." if shrunk else ""),
                f"Use {value}.",
            )  # fmt: skip


def catalogued(name: str) -> Any:
    """The catalogue's model of that name; None where it has none (a path, a private name)."""
    from ...catalog.load import load_model
    from ..spec import catalogued as known

    found = known(name)
    return None if found is None else load_model(found)


def _vocabulary(setup: Setup) -> Iterator[Finding]:
    """A vocabulary that tensor parallelism splits, with the size it is padded to."""
    fact, tp = setup.fact("model.vocab_size"), whole(setup.value("strategy.tp")) or 1
    size = whole(fact.value) if fact else None
    if fact is None or not size or tp == 1:
        return
    multiple = whole(setup.value("model.make_vocab_size_divisible_by")) or (128 if setup.value("strategy.framework") == "megatron" else 1)
    if multiple == 1 and size % tp:
        padded = -(-size // tp) * tp
        yield about(
            fact,
            "K25",
            WARNING,
            f"Vocabulary {size} is no multiple of tp {tp} and is not padded.",
            f"Pad it to {padded} (make_vocab_size_divisible_by {tp} or 64).",
        )
    elif multiple > 1 and size % (multiple * tp):
        yield about(
            fact,
            "K25",
            NOTE,
            f"Vocabulary {size} is padded to {-(-size // (multiple * tp)) * multiple * tp} (a multiple of {multiple} x tp {tp}).",
        )


CHECK = (
    Check(
        "K21", "names of classes, policies and kernels exist", names,
        Example({"fsdp.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: SIZE\n  "
            "fsdp_min_num_params: 1000000\n"
                 "  fsdp_sharding_strategy: FULL_SHARD\nmachine_rank: 0\nmain_training_function: main\nmixed_precision: bf16\nnum_machines: "
                 "1\nnum_processes: 8\n"}),
        "error", "an old strategy name where the file says version 1; a number for an enumeration",
    ),
    Check(
        "K25", "the model is the published one", presets,
        Example({"llama3_405b.toml": '[job]\ndump_folder = "out"\n[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\n'
            'seq_len = 8192\nsteps = 100\n'
                 "[parallelism]\ntensor_parallel_degree = 8\n[optimizer]\nname = \"AdamW\"\nlr = 1e-4\n"}),
        "warning; note for fewer layers and for the padded vocabulary", "a proxy with fewer layers",
    ),
)  # fmt: skip
