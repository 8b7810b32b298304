"""Weights in Hugging Face's safetensors layout, in and out: the names and shapes of transformers on disk, ours in the trainer.

Most names differ by a prefix. GPT-2 keeps q, k and v in one transposed ``c_attn`` and transposes every product (Conv1D); experts lie apart on disk and are
stacked here (Mixtral's w1, w3, w2 are gate, up, down).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import SpecError, one_line
from ..spec.model import ModelSpec

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # transformers' own limit
TABLES = ("wte.weight", "embed_tokens.weight", "lm_head.weight")  # a row a token
GPT_PRODUCTS = {"attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
MIXTRAL_EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


@dataclass(frozen=True)
class Place:
    """Where one of our weights lies on disk: `names`, stacked where there are several; `part` of `parts` of the last dim; `turned`: transposed."""

    names: tuple[str, ...]
    turned: bool = False
    part: int = 0
    parts: int = 1


def place_of(model: ModelSpec, name: str) -> Place:
    """`name` as the trainer's parameters have it (``layers.0.self_attn.q_proj.weight``)."""
    gpt = model.model_type == "gpt2"
    if name == "head.lm_head.weight":
        return Place((("transformer.wte.weight" if gpt else "model.embed_tokens.weight") if model.tied else "lm_head.weight",))
    where, rest = name.split(".", 1)
    if where != "layers":
        return Place((f"{'transformer' if gpt else 'model'}.{rest}",))
    number, rest = rest.split(".", 1)
    if gpt:
        return _place_in_gpt(f"transformer.h.{number}.", rest)
    layer = f"model.layers.{number}."
    mixtral = model.model_type == "mixtral"
    if found := re.fullmatch(r"mlp\.experts\.(\w+)\.weight", rest):
        inner = f"block_sparse_moe.experts.{{}}.{MIXTRAL_EXPERTS[found[1]]}.weight" if mixtral else f"mlp.experts.{{}}.{found[1]}.weight"
        return Place(tuple(layer + inner.format(i) for i in range(model.experts)))
    return Place((layer + (rest.replace("mlp.", "block_sparse_moe.") if mixtral else rest),))


def _place_in_gpt(layer: str, rest: str) -> Place:
    module, kind = rest.rsplit(".", 1)
    turned = kind == "weight"
    if module.startswith("attn.") and module[5] in "qkv":
        return Place((f"{layer}attn.c_attn.{kind}",), turned, "qkv".index(module[5]), 3)
    if module in GPT_PRODUCTS:
        return Place((f"{layer}{GPT_PRODUCTS[module]}.{kind}",), turned)
    return Place((layer + rest,))


# --- reading ---------------------------------------------------------------------------------------------------------------------------------------


class Folder:
    """The tensors of a folder of safetensors, read one at a time. Raises `SpecError` for what is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index, single = folder / INDEX, folder / SINGLE
        if not index.exists() and not single.exists():
            raise SpecError(f"{folder} has neither {SINGLE} nor {INDEX}", "init")
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [SINGLE]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise SpecError(f"{index} cannot be read: {one_line(error, 200)}", "init") from error
        self.handles = [self._open(str(file)) for file in files]
        self.found = {name: handle for handle in self.handles for name in handle.keys()}  # noqa: SIM118

    def _open(self, file: str) -> Any:
        try:
            return safe_open(str(self.folder / file), framework="pt")
        except (OSError, SafetensorError) as error:
            raise SpecError(f"{self.folder / file} cannot be read: {one_line(error, 200)}", "init") from error

    def check(self, model: ModelSpec) -> None:
        """Raises `SpecError` where the files hold more layers than the model, whose first ones would load without a word."""
        found = [int(m[1]) for name in self.found if (m := re.search(r"(?:^|\.)(?:layers|h)\.(\d+)\.", name))]
        if found and max(found) >= model.num_layers:
            raise SpecError(
                f"{self.folder} holds {max(found) + 1} layers, the model has {model.num_layers}: it is of another model", "init"
            )

    def __call__(self, name: str) -> torch.Tensor:
        bare = name.split(".", 1)[1] if "." in name else name  # files of the bare model have no prefix
        for known in (name, bare):
            if known in self.found:
                return self.take(known)
        raise SpecError(f"{self.folder} holds no {name}: it is of another model", "init")

    def take(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.found[name].get_tensor(name)
        return tensor


def fitting(model: ModelSpec, get: Folder, name: str, shape: torch.Size) -> torch.Tensor:
    """One of our weights, whole, that is to have that shape."""
    place = place_of(model, name)
    whole = read(place, get)
    if place.names[0].endswith(TABLES) and whole.shape[1:] == shape[1:] and whole.shape != shape:
        raise SpecError(f"{get.folder} has a vocabulary of {whole.shape[0]:,}, the model of {model.vocab:,}", "init")
    if whole.shape != shape:
        raise SpecError(f"{place.names[0]} is {tuple(whole.shape)} in {get.folder}, {tuple(shape)} in the model", "init")
    return whole


def read(place: Place, get: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """One of our weights, whole, from the tensors on disk."""
    found = torch.stack([get(n) for n in place.names]) if len(place.names) > 1 else get(place.names[0])
    found = found.chunk(place.parts, -1)[place.part] if place.parts > 1 else found
    return found.T if place.turned else found


class Shapes(Folder):
    """The same folder, whose tensors have shapes only."""

    def take(self, name: str) -> torch.Tensor:
        return torch.empty(self.found[name].get_slice(name).get_shape(), device="meta")


def check(model: ModelSpec, folder: Path, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises `SpecError` where `load` would for a whole model; reads no tensor."""
    get = Shapes(folder)
    get.check(model)
    for name, p in named:
        fitting(model, get, name, p.shape)


@torch.no_grad()
def load(model: ModelSpec, folder: Path, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fills this rank's parameters, whatever splits them. Raises `SpecError` where the files are of another model."""
    get = Folder(folder)
    get.check(model)
    for name, p in named:
        whole = fitting(model, get, name, p.shape).to(p.dtype)
        if isinstance(p, DTensor):
            split = distribute_tensor(whole.contiguous().to(p.to_local().device), p.device_mesh, p.placements, src_data_rank=None)
            p.to_local().copy_(split.to_local())
        else:
            p.copy_(whole)


# --- writing ---------------------------------------------------------------------------------------------------------------------------------------


def convert(model: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Our whole weights -> (name on disk, tensor), each once."""
    gathered: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        place = place_of(model, name)
        if name == "head.lm_head.weight" and model.tied:
            continue
        if len(place.names) > 1:
            yield from zip(place.names, tensor.unbind(0))
            continue
        tensor = tensor.T if place.turned else tensor
        if place.parts == 1:
            yield place.names[0], tensor
            continue
        parts = gathered.setdefault(place.names[0], [torch.empty(0)] * place.parts)
        parts[place.part] = tensor
        if all(p.numel() for p in parts):
            yield place.names[0], torch.cat(gathered.pop(place.names[0]), -1)


def save(model: ModelSpec, tensors: Mapping[str, torch.Tensor], folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Whole weights and ``config.json``, which transformers' ``from_pretrained`` reads; each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in convert(model, tensors):
        if size and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().cpu().contiguous().clone()
        size += tensor.nbytes
    files = [SINGLE] if len(shards) == 1 else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards):
        _whole(folder / file, partial(save_file, shard, metadata={"format": "pt"}))
    if len(shards) > 1:
        total = sum(t.nbytes for s in shards for t in s.values())
        index = {"metadata": {"total_size": total}, "weight_map": {n: f for f, s in zip(files, shards) for n in s}}
        _whole(folder / INDEX, lambda path: Path(path).write_text(json.dumps(index, indent=2)))
    config = {**model.config, "model_type": model.model_type, "architectures": [ARCHITECTURES.get(model.model_type, "")]}
    config |= {"tie_word_embeddings": model.tied}
    _whole(folder / "config.json", lambda path: Path(path).write_text(json.dumps(config, indent=2)))


def _whole(target: Path, write: Callable[[str], Any]) -> None:
    temporary = str(target) + ".tmp"
    write(temporary)
    os.replace(temporary, target)
