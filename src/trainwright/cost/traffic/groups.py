"""Groups of parameters that are gathered and reduced together."""

from __future__ import annotations

import numpy as np

from ...spec.blocks import Block
from ..table import IntColumn
from .columns import Case


def groups(case: Case) -> list[tuple[bool, IntColumn, tuple[Block, ...]]]:
    """(is a layer, how many on this rank, its blocks): one group a layer, one for what is left at the ends."""
    model, stage = case.model, case.stage
    found: list[tuple[bool, IntColumn, tuple[Block, ...]]] = [(True, count, (model.blocks[name],)) for name, count in stage.layers.items()]
    found += [(True, stage.head, (block,)) for block in model.mtp]
    both = np.where(
        case.table.pp == 1, stage.embedding * stage.head, 0
    )  # a rank that holds both ends of a pipeline holds them in two stages
    found.append((False, both, (model.embedding, model.head)))
    found.append((False, stage.embedding - both, (model.embedding,)))
    found.append((False, stage.head - both, (model.head,)))
    return found


def gathered_bytes(case: Case) -> int:
    """Bytes an element of a gathered parameter: what modules read, one byte with fp8 parameters."""
    if case.structure.fp8_params:
        return 1
    return case.types.read
