"""The form that a framework's file fills in."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..spec.plan import Structure


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
    * `compiled_loss_since`: year-month of the release from which ``compile`` takes in the loss as well ("" = never): no fp32 copies of
    the logits.
    * `holds_outputs`: what a training loop around Hugging Face models does with the model's output, and with it the 16-bit logits, until
    backward
      is over: no = frees it; cached = loops differ, counted as a block that can be given back; live = keeps it.
    """

    engine: str = "ledger"  # tape: replayed op by op, exact to the byte; ledger: sums of published rules
    parameter_dtype: str = "compute"  # compute: 16-bit copy beside fp32 masters; master: the one sharded copy is fp32 where masters are
    wraps_alone: bool = True  # also where nothing is sharded and no other rank has data
    adapts_fp32: bool = False  # a base under adapters is loaded in fp32 where masters are
    reduces: str = "any"  # gradients are in: any = `gradient_dtype`; own = the type of the weights, another under mixed precision alone; fp32 = own or fp32
    autocasts: bool = False  # ``torch.autocast`` around forward is what it runs with ``training.autocast``
    saves: SaveRules = field(default_factory=SaveRules)
    saves_parallel: SaveRules | None = None
    selective: str = "op-list"  # core_attn | op-list
    fused_loss: str = "linear"  # kernel | linear
    accumulates_in_buffer: bool = False
    holds_outputs: str = "no"  # no | cached | live
    reduces_each_families: tuple[str, ...] = ()  # families whose code reduces gradients after each micro-batch where others put it off
    reduces_each_where_offloaded: bool = False  # with parameters on the host so are the loops: whole gradients would not fit on the card
    kernel_loss_families: tuple[str, ...] = ()  # families whose plain loss is a kernel on 16-bit logits in the code that trains them
    compiled_loss_since: str = ""  # year-month from which ``compile`` includes the loss
    source: str = ""

    def puts_off(self, family: str, structure: Structure) -> bool:
        """Whether whole gradients are kept over the micro-batches of a step and reduced once: option ``no_sync``, by default what the loops do that train
        the family."""
        moves = self.reduces_each_where_offloaded and structure.offload.startswith("params")
        return dict(structure.options).get("no_sync", family not in self.reduces_each_families and not moves) is True


@dataclass(frozen=True)
class TimeRules:
    """What overlaps with what, and the host's part.

    * Kernels: `fusion` names the passes of ``catalog/kernels.toml`` (fused | eager) that elementwise kernels make, `compiles` whether
    `compile`
      changes them, `eager_when_sharded` that ZeRO-2 and 3 run around Hugging Face's own modules (adapters always do); `fuses_projections`
      runs
      q, k, v (gate, up) as one product; `fuses_gradient_sum` sums weight gradients in the product's epilogue; `gather_copy_bytes` are
      moved a
      parameter around each gather and reduction of FSDP; `attention` is whose fused kernel runs, "te" (Transformer Engine) or "sdpa"
      (PyTorch).
    * Recomputation: `checkpoint_stops_early` leaves out the last product, `selective` is what that mode repeats.
    * Host: `host_s_per_kernel` is (since year, seconds a launch) pairs, `host_s_per_expert` more a local expert, `host_s_per_dispatch` more for
      routing (where no capacity is set the host waits for the token counts), `host_s_per_gather` more for each weight that ZeRO-3 fetches and
      frees by itself, in every pass, `micro_batch_s` a pause each micro-batch.
    * Hidden: `hides_tp` of the tensor-parallel traffic with async_tp, `hides_ep` of the expert all-to-all from `hides_ep_since`,
    `dp_residual` of overlapped
      data-parallel traffic that shows all the same, `overlaps_dp_since` the year from which it overlaps at all,
      `gather_slowdown` (since year, factor) pairs on the traffic of sharded parameters,
      `configures_overlap_since` that from which usual configurations turn on an overlap of gradients that is off by default,
      `hides_input_gradient_since` that from which the reduction of an input gradient runs behind the weight gradient's product.
    * Pipeline: `blocking_p2p`: 1F1B's sends keep the rank busy; `scatters_p2p`: each tensor-parallel rank sends its part between stages
    and the
      whole is gathered there.
    """

    fusion: str = "eager"
    eager_when_sharded: bool = False
    compiles: bool = False
    fuses_projections: bool = False
    fuses_gradient_sum: bool = False
    gather_copy_bytes: float = 0.0
    checkpoint_stops_early: bool = False
    selective: str = "core_attn"
    default_fp8_recipe: str = "delayed"
    host_s_per_kernel: tuple[tuple[float, float], ...] = ((0.0, 20e-6),)
    host_s_per_expert: float = 0.0
    host_s_per_dispatch: float = 0.0
    host_s_per_gather: float = 0.0
    micro_batch_s: float = 0.0
    hides_tp: float = 0.0
    hides_ep: float = 0.0
    hides_ep_since: float = 0.0
    dp_residual: float = 0.33
    overlaps_dp_since: float = 0.0
    configures_overlap_since: float = 9999.0
    gather_slowdown: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    blocking_p2p: bool = False
    scatters_p2p: bool = False
    attention: str = "sdpa"
    hides_input_gradient_since: float = 9999.0
    source: str = ""

    def host_seconds(self, year: float) -> float:
        """Seconds that the host needs to launch one kernel with the software of `year`."""
        return [s for since, s in self.host_s_per_kernel if year >= since][-1]

    def gather_factor(self, year: float) -> float:
        """How much longer than alone the traffic of sharded parameters takes with the software of `year`."""
        return [f for since, f in self.gather_slowdown if year >= since][-1]


@dataclass(frozen=True)
class Framework:
    """`defaults` are the framework's own values of strategy and training fields that a run spec leaves out."""

    name: str
    title: str
    shardings: tuple[str, ...]  # sharding names it can do
    schedules: tuple[str, ...]  # pipeline schedules that it has, and a search tries
    aliases: tuple[str, ...] = ()
    runs_lists: bool = (
        False  # this project's trainer runs its plans, and any registered schedule from its list of actions where one is named
    )
    axes: tuple[str, ...] = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")  # mesh axes it offers
    defaults: dict[str, object] = field(default_factory=dict)
    search_options: tuple[tuple[str, object], ...] = ()  # options that a search sets where a run spec names none
    pad_vocab_multiple: int = 1  # the vocabulary is padded to a multiple of this times tp
    saves_copies: bool = False  # a checkpoint holds 16-bit weights and the fp32 masters beside them
    mixes_whole_gradients: bool = True  # those that no sharding splits may be of another type than the weights
    offloads: tuple[str, ...] = ("none",)  # what it can move to host memory or disk
    replicates_kv_heads: bool = False  # tp may be a multiple of the key-value heads: each is then held by several ranks
    even_stages: bool = False  # every pipeline stage gets the same number of layers where that divides
    shards_over_cp: bool = True  # states are cut over context parallel ranks as well
    # the least ZeRO stage at which an offload has an effect, on a single rank too; 0 where it is not named
    offload_stages: dict[str, int] = field(default_factory=lambda: {"params-cpu": 2, "params-nvme": 2})
    pipeline_zero_stage: int = 3  # the highest ZeRO stage that runs together with pipeline stages
    # keys of a run spec that change nothing: {key: (why, only these values, only with several ranks)}
    ignores: dict[str, tuple[str, tuple[str, ...], bool]] = field(default_factory=dict)
    memory: MemoryRules = field(default_factory=MemoryRules)
    time: TimeRules = field(default_factory=TimeRules)
    source: str = ""
