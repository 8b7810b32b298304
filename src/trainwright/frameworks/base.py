"""The form that a framework's file fills in."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SaveRules:
    """What the kernels of a framework leave for backward, where kernels differ. Defaults are Hugging Face modules run op by op.

    `keeps_gathered_inputs`: with sequence parallelism the gathered input of a column-parallel product is saved whole (DTensor); otherwise
    its shard
    is saved and gathered again in backward. `fp8_inputs`: products in fp8 save their inputs in fp8. `scores_fp32`: an unfused softmax
    keeps an fp32
    copy beside the 16-bit one. `probabilities_in_activation`: the routing weights of experts are applied inside the activation, so that the
    outputs of the experts are not saved.
    """

    fused_norm: bool = False
    fused_gate: bool = False
    keeps_gathered_inputs: bool = True
    fp8_inputs: bool = False
    scores_fp32: bool = True
    probabilities_in_activation: bool = False
    source: str = "transformers modeling_*.py, torch autograd formulas"


@dataclass(frozen=True)
class MemoryRules:
    """What is held where. Sizes in bytes, types as in `spec.precision`.

    * `saves` of the framework's own kernels; `saves_parallel` where tp or pp is above 1 (DeepSpeed then runs Megatron's layers).
    * `selective`: what ``recompute = "selective"`` drops: the attention core, or the op list of torchtitan (every second product kept).
    * `fused_loss`: kernel (in place on the logits) or linear (projection and loss in chunks, no whole logits).
    * `accumulates_in_buffer`: weight gradients are added into one contiguous buffer that exists all the time.
    """

    engine: str = "ledger"  # tape: replayed op by op, exact to the byte; ledger: sums of published rules
    parameter_dtype: str = "compute"  # compute: 16-bit copy beside fp32 masters; master: the one sharded copy is fp32 where masters are
    saves: SaveRules = field(default_factory=SaveRules)
    saves_parallel: SaveRules | None = None
    selective: str = "op-list"  # core_attn | op-list
    fused_loss: str = "linear"  # kernel | linear
    accumulates_in_buffer: bool = False
    source: str = ""


@dataclass(frozen=True)
class TimeRules:
    """What overlaps with what, and the host's part."""

    source: str = ""


@dataclass(frozen=True)
class Framework:
    """`defaults` are the framework's own values of strategy and training fields that a run spec leaves out."""

    name: str
    title: str
    shardings: tuple[str, ...]  # sharding names it can do
    schedules: tuple[str, ...]  # pipeline schedules it can run
    aliases: tuple[str, ...] = ()
    axes: tuple[str, ...] = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")  # mesh axes it offers
    defaults: dict[str, object] = field(default_factory=dict)
    pad_vocab_multiple: int = 1  # the vocabulary is padded to a multiple of this times tp
    offloads: tuple[str, ...] = ("none",)  # what it can move to host memory or disk
    replicates_kv_heads: bool = False  # tp may be a multiple of the key-value heads: each is then held by several ranks
    pipeline_zero_stage: int = 3  # the highest ZeRO stage that runs together with pipeline stages
    memory: MemoryRules = field(default_factory=MemoryRules)
    time: TimeRules = field(default_factory=TimeRules)
    source: str = ""
