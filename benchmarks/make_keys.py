"""Writes `check/keys/<format>.json`: the keys that an engine's own source defines, taken from a checkout of it (names alone, nothing of its text).

    python benchmarks/make_keys.py gpt_neox CHECKOUT      # gpt_neox, llm_foundry, torchtune, nemo, automodel: a git checkout, HEAD is read
    python benchmarks/make_keys.py torchrun               # of the torch that is installed

The lists of the other formats came from the same kinds of places (each file names its source) before this script was written.
"""

from __future__ import annotations

import ast
import fnmatch
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

KEYS = Path(__file__).parents[1] / "src" / "trainwright" / "check" / "keys"
Tables = dict[str, set[str]]


class Checkout:
    """The files of HEAD of a git checkout, with or without a work tree."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def git(self, *words: str) -> str:
        return subprocess.run(["git", "-C", self.folder, *words], capture_output=True, text=True, check=True).stdout

    @property
    def commit(self) -> str:
        return self.git("rev-parse", "HEAD").strip()[:12]

    def read(self, path: str) -> str:
        return self.git("show", f"HEAD:{path}")

    def matching(self, pattern: str) -> list[str]:
        return [p for p in self.git("ls-tree", "-r", "--name-only", "HEAD").splitlines() if fnmatch.fnmatch(p, pattern)]


def plain(name: str) -> str:
    return name.strip().lstrip("-").replace("-", "_").lower()


def fields(source: str, *classes: str) -> set[str]:
    """Annotated fields of the classes (of every class where none is named)."""
    found = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef) and (not classes or n.name in classes)]
    return {a.target.id for c in found for a in c.body if isinstance(a, ast.AnnAssign) and isinstance(a.target, ast.Name)}


def parameters(source: str, name: str) -> set[str]:
    """Parameters of a class's __init__."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    return {a.arg for a in (*item.args.args, *item.args.kwonlyargs)} - {"self"}
    return set()


def read_names(source: str, *objects: str) -> Iterator[str]:
    """``cfg.name``, ``cfg["name"]``, ``cfg.get("name")``: dotted names that the code reads of these objects."""
    for node in ast.walk(ast.parse(source)):
        owner = getattr(node, "value", None)
        if isinstance(node, ast.Attribute) and isinstance(owner, ast.Name) and owner.id in objects:
            yield node.attr
        if isinstance(node, ast.Subscript) and isinstance(owner, ast.Name) and owner.id in objects and isinstance(node.slice, ast.Constant):
            yield str(node.slice.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
            target, first = node.func.value, node.args[0]
            if isinstance(target, ast.Name) and target.id in objects and isinstance(first, ast.Constant):
                yield str(first.value)


def tables_of(documents: Iterable[Any], depth: int) -> Tables:
    """Keys of the tables of YAML files, down to `depth`."""
    found: Tables = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if not isinstance(node, dict) or len(path) > depth:
            return
        for key, value in node.items():
            found.setdefault(".".join(path), set()).add(plain(str(key)))
            walk(value, (*path, str(key)))

    for document in documents:
        walk(document, ())
    return found


class _Loader(yaml.SafeLoader):
    """The safe loader, which takes a tag for its value."""


_Loader.add_multi_constructor("", lambda loader, suffix, node: None)


def yamls(checkout: Checkout, *patterns: str) -> Iterator[Any]:
    for pattern in patterns:
        for path in checkout.matching(pattern):
            try:
                yield from yaml.load_all(checkout.read(path), _Loader)
            except yaml.YAMLError:
                continue


def gpt_neox(checkout: Checkout) -> dict[str, Any]:
    names = set().union(*(fields(checkout.read(p)) for p in checkout.matching("megatron/neox_arguments/*_args.py")))
    return {"source": f"EleutherAI/gpt-neox@{checkout.commit} megatron/neox_arguments/*_args.py", "tables": {"": names}, "refused": [""]}


def llm_foundry(checkout: Checkout) -> dict[str, Any]:
    path = "llmfoundry/utils/config_utils.py"
    names = fields(checkout.read(path), "TrainConfig")
    return {"source": f"mosaicml/llm-foundry@{checkout.commit} {path}", "tables": {"": names, "parameters": names}}


def torchtune(checkout: Checkout) -> dict[str, Any]:
    names = tables_of(yamls(checkout, "recipes/configs/*.yaml", "recipes/configs/*/*.yaml"), 0)[""]
    for path in checkout.matching("recipes/*.py"):
        names |= {n.partition(".")[0] for n in read_names(checkout.read(path), "cfg", "config")} - {
            "get",
            "parse",
            "instantiate",
            "log_config",
        }
    return {"source": f"pytorch/torchtune@{checkout.commit} recipes/*.py, recipes/configs", "tables": {"": names}}


def nemo(checkout: Checkout) -> dict[str, Any]:
    found = tables_of(yamls(checkout, "examples/nlp/language_modeling/conf/*.yaml", "examples/nlp/language_modeling/tuning/conf/*.yaml"), 2)
    kept = ("", "trainer", "exp_manager", "model", "model.optim", "model.optim.sched", "model.data", "model.peft", "model.tokenizer")
    return {
        "source": f"NVIDIA/NeMo@{checkout.commit} examples/nlp/language_modeling/conf",
        "tables": {k: found[k] for k in kept if k in found},
    }


def automodel(checkout: Checkout) -> dict[str, Any]:
    package = "nemo_automodel/components"
    top = tables_of(
        yamls(checkout, "examples/llm_*/*.yaml", "examples/vlm_*/*.yaml", "examples/llm_*/*/*.yaml", "examples/vlm_*/*/*.yaml"), 1
    )
    steps = checkout.matching(f"{package}/training/step_scheduler.py") or checkout.matching("*/step_scheduler.py")
    checkpoint = fields(checkout.read(f"{package}/checkpoint/config.py"), "CheckpointingConfig")
    distributed = fields(checkout.read(f"{package}/distributed/config.py"))
    tables = {
        "": top[""],
        "step_scheduler": top["step_scheduler"] | set().union(*(parameters(checkout.read(p), "StepScheduler") for p in steps)),
        "checkpoint": top["checkpoint"] | checkpoint,
        "distributed": top["distributed"] | distributed,
    }
    return {"source": f"NVIDIA-NeMo/Automodel@{checkout.commit} examples, {package}/{{training,checkpoint,distributed}}", "tables": tables}


def torchrun(_: Checkout) -> dict[str, Any]:
    import torch
    from torch.distributed import launch, run

    names: set[str] = set()
    for module in (run, launch):
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                names |= {plain(str(a.value)) for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("-")}
    return {
        "source": "torch distributed/run.py, distributed/launch.py",
        "version": torch.__version__.partition("+")[0],
        "tables": {"": names},
    }


FORMATS = {f.__name__: f for f in (gpt_neox, llm_foundry, torchtune, nemo, automodel, torchrun)}


def main(name: str, folder: str = ".") -> None:
    checkout = Checkout(folder)
    found = FORMATS[name](checkout)
    tables = {table: sorted(plain(k) for k in keys) for table, keys in found.pop("tables").items()}
    document = {"source": found.pop("source"), "version": found.pop("version", None) or checkout.commit, "tables": tables, **found}
    (KEYS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(name, {table: len(keys) for table, keys in tables.items()})


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in FORMATS:
        sys.exit(__doc__)
    main(*sys.argv[1:])
