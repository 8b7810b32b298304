"""Optimizers as rows: what each keeps for a parameter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Optimizer:
    """`copies` states in the stored type of the parameter, or `bytes_per_element` where the state has a format of its own.

    `step_bytes`: the step counter that a tensor keeps (PyTorch: fp32). `factored`: a row and a column instead of a whole second moment for
    tensors of two or more dimensions. `matrix_copies`: for tensors of two dimensions where that differs (Muon). `pageable`: states may live in host memory.
    `block`: elements that share a scale of fp32 (block-wise 8-bit), `min_elements`: smaller tensors keep 32-bit states. `temporaries`: copies of a
    tensor that an unfused step holds at once beside its gradient.
    """

    name: str
    copies: int
    bytes_per_element: float | None = None
    step_bytes: int = 0
    factored: bool = False
    matrix_copies: int | None = None
    pageable: bool = False
    block: int = 0
    min_elements: int = 0
    temporaries: int = 0
    source: str = ""


OPTIMIZERS: dict[str, Optimizer] = {
    o.name: o
    for o in (
        Optimizer("adamw", 2, step_bytes=4, temporaries=2, source="torch.optim.AdamW: exp_avg, exp_avg_sq, step"),
        Optimizer(
            "adam8bit",
            2,
            bytes_per_element=1,
            block=256,
            min_elements=4096,
            source="bitsandbytes 8-bit block-wise states, blocks of 256, min_8bit_size 4096",
        ),
        Optimizer(
            "paged_adam8bit",
            2,
            bytes_per_element=1,
            block=256,
            min_elements=4096,
            pageable=True,
            source="bitsandbytes paged optimizer",
        ),
        Optimizer(
            "adafactor",
            1,
            factored=True,
            step_bytes=4,
            temporaries=1,
            source="arXiv:1804.04235, without momentum: one row and one column a matrix",
        ),
        Optimizer("lion", 1, temporaries=2, source="arXiv:2302.06675: momentum only"),
        Optimizer(
            "muon",
            2,
            matrix_copies=1,
            step_bytes=4,
            temporaries=3,
            source="Muon: one momentum a matrix; AdamW for embedding, head and vectors",
        ),
        Optimizer("sgd", 0, source="torch.optim.SGD without momentum"),
        Optimizer("sgd_momentum", 1, source="torch.optim.SGD: momentum_buffer"),
    )
}
