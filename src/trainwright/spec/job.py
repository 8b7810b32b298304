"""What is trained: everything about a run that is not the model, the cluster or the layout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingJob:
    """Fields as in the run spec's ``[training]``, resolved: nothing is left open. `global_batch_size` is in sequences."""

    seq_len: int
    global_batch_size: int
    tokens: float | None = None
    precision: str = "bf16"
    fp8_recipe: str | None = None
    optimizer: str = "adamw"
    master_weights: str = "fp32"
    autocast: bool = False
    gradient_dtype: str = "fp32"
    optimizer_kernel: str = "fused"
    dropout: float = 0.0
    packing: bool = False
    mean_document_len: int | None = None
    optimizer_in_backward: bool = False
    moe_capacity_factor: float | None = None
    loss: str = "plain"
    loss_chunks: int = 8
    method: str = "full"
    lora_rank: int = 16
    lora_targets: tuple[str, ...] = ()
    base_quantization: str | None = None

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.global_batch_size
