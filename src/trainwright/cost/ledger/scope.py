"""The sizes that every rule of the ledger is written in, as columns over the plans of one structure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...frameworks import FRAMEWORKS
from ...frameworks.base import Framework
from ...frameworks.dtypes import Dtypes, dtypes
from ...spec.cluster import ClusterSpec
from ...spec.job import TrainingJob
from ...spec.model import ModelSpec
from ...spec.plan import Structure
from ...spec.precision import DTYPE_BYTES, activation_bytes
from ..table import Column, PlanTable


def ceil_div(a: Column | float, b: Column | float) -> Column:
    return np.ceil(np.asarray(a) / b)


def add_up(columns: Iterable[Column], n: int) -> Column:
    """The sum of columns of `n` entries, one pass each."""
    total: Column = np.zeros(n)
    for column in columns:
        total += column
    return total


@dataclass(frozen=True)
class Scope:
    """One structure's plans. Columns are float64 that hold whole numbers (exact below 2**53).

    `tokens`: of one micro-batch on this rank between column- and row-parallel products (context parallelism divides the sequence);
    `sequence_tokens`: outside of them, divided by tp with sequence parallelism; `routed_tokens`: rows that enter this rank's experts when
    the router is
    balanced, `moe_capacity_factor` included; c: bytes of an activation element.
    """

    model: ModelSpec
    cluster: ClusterSpec
    job: TrainingJob
    structure: Structure
    table: PlanTable

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def framework(self) -> Framework:
        return FRAMEWORKS[self.structure.framework]

    def column(self, name: str) -> Column:
        return np.asarray(getattr(self.table, name), dtype=np.float64)

    @cached_property
    def b(self) -> Column:
        return self.column("micro_batch_size")

    @cached_property
    def tp(self) -> Column:
        return self.column("tp")

    @cached_property
    def cp(self) -> Column:
        return self.column("cp")

    @cached_property
    def pp(self) -> Column:
        return self.column("pp")

    @cached_property
    def ep(self) -> Column:
        return self.column("ep")

    @cached_property
    def etp(self) -> Column:
        return self.column("etp")

    @cached_property
    def accumulation(self) -> Column:
        return self.column("accumulation")

    @cached_property
    def c(self) -> int:
        return activation_bytes(self.job.precision)

    @cached_property
    def rank_seq(self) -> Column:
        """Positions of a sequence that this rank holds."""
        return ceil_div(float(self.job.seq_len), self.cp)

    @cached_property
    def tokens(self) -> Column:
        return self.b * self.rank_seq

    @cached_property
    def sequence_tokens(self) -> Column:
        return ceil_div(self.tokens, self.tp) if self.structure.sequence_parallel else self.tokens

    @cached_property
    def routed_tokens(self) -> Column:
        factor = self.job.moe_capacity_factor or 1.0
        return np.ceil(self.sequence_tokens * max(self.model.top_k, 1) * factor) * self.etp

    @cached_property
    def shards(self) -> Column:
        """Ranks over which the optimizer of a dense parameter is split: dp_shard, with context parallelism folded in (it holds copies of
        the weights).
        """
        return self.column("dp_shard") * self.cp if self.stage >= 1 else np.ones(len(self))

    @cached_property
    def expert_shards(self) -> Column:
        """The same for the weights of experts: of dp_shard x cp x tp ranks, ep x etp hold different experts."""
        if self.stage < 1:
            return np.ones(len(self))
        return np.maximum(self.column("dp_shard") * self.cp * self.tp / (self.ep * self.etp), 1.0)

    @cached_property
    def data_ranks(self) -> Column:
        """Ranks that hold the same weights: replicas, shards and context parallelism."""
        return self.column("dp_replicate") * self.column("dp_shard") * self.cp

    @cached_property
    def stage(self) -> int:
        return {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}[self.structure.sharding]

    @cached_property
    def dtype_bytes(self) -> int:
        """Bytes of the compute type's stored weights; fp8 and fp4 train on 16-bit weights unless `fp8_params`."""
        return self.c

    @cached_property
    def gradient_bytes(self) -> int:
        return self.types.reduced

    @cached_property
    def types(self) -> Dtypes:
        """Number formats on one of several ranks of data parallelism; `each` has those of every plan."""
        return dtypes(self.framework, self.job, self.structure, alone=False)

    def each(self, name: str) -> Column:
        """A field of `Dtypes` as a column: a rank alone may hold other formats."""
        alone = dtypes(self.framework, self.job, self.structure, alone=True)
        return np.where(self.data_ranks == 1, float(getattr(alone, name)), float(getattr(self.types, name)))

    @cached_property
    def masters(self) -> bool:
        """fp32 copies of the weights beside weights of fewer bits."""
        return self.types.masters

    @cached_property
    def offloads_parameters(self) -> bool:
        return self.structure.offload in ("params-cpu", "params-nvme")

    @cached_property
    def fp32_stream(self) -> bool:
        """Autocast leaves the residual stream and norms in fp32.

        PEFT's ``prepare_model_for_kbit_training`` casts what is not quantized (embeddings, norms, head) to fp32, and with it the
        residual stream; not
        for GPTQ's int4, and not where sharded bases need one type for all weights (``bnb_4bit_quant_storage``).
        """
        if self.types.autocast:
            return True
        shards = self.stage == 3 or self.structure.framework in ("fsdp1", "megatron")
        return self.job.method == "qlora" and self.job.base_quantization in ("nf4", "int8") and self.c == 2 and not shards

    @cached_property
    def adapter_dropout(self) -> bool:
        """Scripts around PEFT drop 5 to 10 % of what enters an adapter (PEFT's and QLoRA's examples); option ``lora_dropout = 0`` says
        otherwise. The tape's
        adapters have none.
        """
        scripts = self.job.method == "qlora" or self.structure.framework in ("deepspeed", "fsdp1")
        return self.job.method != "full" and scripts and self.option("lora_dropout", 0.05) > 0

    @cached_property
    def frozen_bytes(self) -> int:
        """Bytes of a frozen weight that is not quantized."""
        return 4 if self.fp32_stream else self.c

    @cached_property
    def fp8_copies(self) -> int:
        """Bytes of the fp8 forms of a weight: row- and column-wise, except where the device multiplies fp8 in any layout with one scale
        (Blackwell).
        """
        if self.job.precision not in ("fp8", "fp4"):
            return 0
        one_form = self.cluster.gpu.arch.startswith(("10.", "12.")) and self.job.fp8_recipe in ("delayed", "tensorwise")
        return 1 if one_form else 2

    def options_bytes(self, name: str, default: int) -> int:
        """Bytes of a number format that an option names (``exp_avg_dtype = "bf16"``)."""
        return int(DTYPE_BYTES.get(str(self.options.get(name, "")), default))

    @cached_property
    def options(self) -> dict[str, object]:
        return dict(self.structure.options)

    def option(self, name: str, default: float) -> float:
        """A framework's own knob under its own name; anything that is no number (such as "auto") gives the default."""
        value = self.options.get(name, default)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    def switch(self, name: str, default: bool) -> bool:
        value = self.options.get(name, default)
        return value if isinstance(value, bool) else default


Mask = NDArray[np.bool_]
