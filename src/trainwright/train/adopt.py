"""A module of one's own under the plan's layout: data parallelism of every kind, recomputation, accumulation, checkpoints; tensor parallelism by its own plan.

`trainwright train plan.toml --model-from package.module:function`, or ``Trainer(run, settings, ranks, model=function)``. The function takes no arguments
and returns a `Model`; the plan's own model stands for its sizes (vocabulary, positions, FLOPs). Five lines make one of a transformers model:

    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = LlamaForCausalLM(LlamaConfig(...))

        def forward(self, tokens):
            return self.inner(input_ids=tokens, use_cache=False).logits
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from ..errors import SpecError, TrainwrightError, one_line
from ..resolve import Run
from .compiled import compile_blocks
from .losses import HeadLoss
from .mesh import Ranks


class Model(Protocol):
    """What is asked of a module. `forward(tokens)`: int64 (batch, tokens) -> logits (batch, tokens, vocabulary).

    It may also have, under these names:

    * ``blocks``: the modules that FSDP2, recomputation and compilation wrap one by one (a list, or a method that gives it). Left out: its longest ModuleList.
    * ``tensor_parallel``: {path of a submodule: ParallelStyle} for ``parallelize_module``, logits replicated again; without it, tensor parallelism is refused.
    * ``summed_loss(logits, labels)``: a scalar, the *sum* over the target tokens (labels other than -100). Left out: cross-entropy in fp32.
    """

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor: ...


Maker = Callable[[], nn.Module]
REFUSED = {"pp": "the pieces of a pipeline", "cp": "attention over parts of a sequence", "ep": "how experts are spread"}


def maker_of(name: str) -> Maker:
    """The function that ``package.module:function`` names. Raises `SpecError`."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute.isidentifier():
        raise SpecError(f"{name[:60]!r} is not package.module:function", "model_from", ["mypackage.models:make"])
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # whatever a module of somebody else's raises
        raise SpecError(f"{module} cannot be imported: {one_line(f'{type(error).__name__}: {error}', 200)}", "model_from") from error
    if not callable(found):
        raise SpecError(f"{module} has no function {attribute}", "model_from")
    maker: Maker = found
    return maker


def refuse_files(model: Maker | None) -> None:
    if model is not None:
        raise SpecError("the files are of the plan's own model: a module of your own loads its weights itself", "init")


def check(run: Run) -> None:
    """Raises `SpecError` for what the protocol says nothing about."""
    plan, s, job = run.plan, run.plan.structure, run.job
    for axis, what in REFUSED.items():
        if getattr(plan, axis) > 1:
            raise SpecError(f"a module of your own does not say {what}", f"strategy.{axis}", [1])
    if job.loss != "plain":
        raise SpecError("a module of your own gives logits, or its own loss", "training.loss", ["plain"])
    if job.packing:
        raise SpecError("a module of your own sees no document boundaries", "training.packing", [False])
    if s.recompute_every > 1 or s.recompute_modules:
        key = "recompute_modules" if s.recompute_modules else "recompute_every"
        raise SpecError("blocks of your own are recomputed whole, one by one", f"strategy.{key}", [[]] if s.recompute_modules else [1])


class Blocks(MutableMapping[str, nn.Module]):
    """Submodules by their path; setting one puts it into its parent."""

    def __init__(self, root: nn.Module, blocks: Iterable[nn.Module]) -> None:
        paths = {id(m): name for name, m in root.named_modules()}
        try:
            self.root, self.paths = root, [paths[id(b)] for b in blocks]
        except KeyError:
            raise SpecError("blocks holds a module that is no part of the model", "model_from") from None

    def __getitem__(self, path: str) -> nn.Module:
        return self.root.get_submodule(path)

    def __setitem__(self, path: str, module: nn.Module) -> None:
        parent, _, leaf = path.rpartition(".")
        setattr(self.root.get_submodule(parent), leaf, module)

    def __delitem__(self, path: str) -> None:
        raise TypeError("blocks are replaced, not removed")

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


class Adopted(nn.Module):
    """A module of one's own with the face of a `Decoder` that is a whole model."""

    def __init__(self, make: Maker, run: Run, seed: int) -> None:
        super().__init__()
        check(run)
        torch.manual_seed(seed)
        made = make()
        if not isinstance(made, nn.Module):
            raise SpecError(f"the function returned {type(made).__name__}, no nn.Module", "model_from")
        self.module = made
        self.vocabulary = run.model.vocab
        self.__dict__["layers"] = Blocks(made, blocks_of(made))  # no submodules of their own: they are the module's
        own = getattr(made, "summed_loss", None)
        self.loss: HeadLoss | None = (lambda head, logits, labels: own(logits, labels)) if callable(own) else None

    def forward(
        self, tokens: torch.Tensor, positions: Any = None, documents: Any = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits = self.module(tokens)
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        if not isinstance(logits, torch.Tensor) or logits.shape != (*tokens.shape, self.vocabulary):
            found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
            raise TrainwrightError(f"the module's forward gave {found}, not logits {(*tokens.shape, self.vocabulary)}")
        return logits if self.loss is None or labels is None else self.loss(self, logits, labels)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Its own `blocks`, else its longest ModuleList, the outermost of equals."""
    own = getattr(module, "blocks", None)
    if own is not None:
        return list(own() if callable(own) and not isinstance(own, nn.Module) else own)
    lists = [list(m) for m in module.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len, default=[])


def apply(own: Adopted, run: Run, ranks: Ranks, backend: str | None) -> nn.Module:
    """The module laid out as the plan says, every rank with rank 0's weights; what to call."""
    from .parallelize import parameter_dtype, recompute, share_data

    own.to(ranks.machine.device)
    with torch.no_grad():
        for tensor in [*own.parameters(), *own.buffers()]:
            dist.broadcast(tensor, 0)
    for p in own.parameters():  # buffers keep their type: rotary angles are no weights
        if p.is_floating_point():
            p.data = p.data.to(parameter_dtype(run))
    if ranks.size("tp") > 1:
        split = getattr(own.module, "tensor_parallel", None)
        split = split() if callable(split) else split
        if not isinstance(split, Mapping):
            raise SpecError("the module has no tensor_parallel plan", "strategy.tp", [1])
        parallelize_module(own.module, ranks.mesh["tp"], dict(split))
    if backend is not None:
        compile_blocks(own.layers.values(), backend)
    recompute(own, run)
    return share_data(own, run, ranks)
