"""A command taken apart: scheduler, launcher and program, each with its own options. ``srun --nodes 4 torchrun --nproc-per-node 8 train.py --lr 1e-5``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..document import Document, Path, Problem
from .shell_run import Command
from .shell_values import Text

# Options that take no value, by launcher: every other option without "=" takes the next word.
BARE = {
    "torchrun": {"standalone", "module", "m", "no-python", "run-path", "help", "use-env", "virtual-local-rank", "enable-elastic-agent"},
    "accelerate": {
        "cpu", "multi-gpu", "tpu", "ipex", "use-xpu", "use-mps-device", "use-deepspeed", "use-fsdp", "use-tpu-cluster", "no-tpu-cluster", "use-megatron-lm",
        "use-parallelism-config", "quiet", "q", "module", "m", "no-python", "debug", "same-network", "dynamo-use-fullgraph", "dynamo-use-dynamic",
        "dynamo-use-regional-compilation", "fsdp-use-orig-params-on", "enable-cpu-affinity", "main-training-function-on", "vm-on",
    },
    "deepspeed": {
        "module", "m", "no-python", "no-local-rank", "save-pid", "force-multi", "enable-each-rank-log-on", "no-ssh", "no-ssh-check",
        "bind-cores-to-rank", "elastic-training",
    },
    "srun": {
        "exclusive", "label", "l", "unbuffered", "u", "overlap", "exact", "pty", "quiet", "Q", "verbose", "v", "no-kill", "k", "overcommit", "O",
        "oversubscribe", "s",
        "wait-all-nodes-on", "container-remap-root", "no-container-remap-root", "container-writable", "container-readonly", "no-container-mount-home",
        "container-mount-home", "no-container-entrypoint", "immediate", "contiguous", "multi-prog", "preserve-env", "E", "slurmd-debug-on", "gres-flags-on",
    },
    "mpirun": {"allow-run-as-root", "tag-output", "oversubscribe", "report-bindings", "bynode", "byslot", "nooversubscribe", "display-map", "v", "q"},
    "python": {"u", "O", "OO", "B", "E", "I", "s", "S", "v", "i"},
}  # fmt: skip
PYTHON = re.compile(r"^(?:.*/)?(?:python[0-9.]*|pypy3?|\$\{?PYTHON\}?|\$\{?PY\}?|\$\{?PYTHON_CMD\}?)$")
OVERRIDE = re.compile(r"^(?:[+~]{1,2}[\w.\-/@]+|[A-Za-z_]\w*(?:\.[\w\-]+)+)=")  # Hydra: a.b=c, +a=b
TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic.run")
# Programs whose name alone says that a configuration follows.
RUNNERS = frozenset((
    "llamafactory-cli", "axolotl", "tune", "trl", "nemo", "automodel", "composer", "torchtitan", "swift", "xtuner", "openrlhf", "megatron", "primus",
    "primus-cli", "autotrain", "lmflow", "oumi",
))  # fmt: skip


@dataclass(frozen=True)
class Option:
    name: str  # without dashes, as written
    values: tuple[Text, ...]
    line: int


@dataclass(frozen=True)
class Layer:
    """One program of a command. `kind`: srun, mpirun, torchrun, accelerate, deepspeed, program. `words`: what is no option, the program first."""

    kind: str
    name: str
    options: tuple[Option, ...] = ()
    words: tuple[Text, ...] = ()
    line: int = 0
    environment: tuple[tuple[str, Text], ...] = ()
    lost: bool = False


def layers(command: Command) -> tuple[Layer, ...]:
    """The command from the outside in; empty where it starts nothing that trains."""
    words = list(command.words)
    found: list[Layer] = []
    for _ in range(8):
        if not words:
            break
        kind, skip = _launcher(words)
        if kind == "":
            break
        if kind == "program":
            found.append(_program(words, command))
            break
        options, rest = _options(words[skip:], BARE[kind])
        if kind == "python":
            module = next((o for o in options if o.name == "m" and o.values), None)
            if module:
                rest = [module.values[0], *rest]
            if not rest:
                break
            found.append(_program(rest, command))
            break
        found.append(Layer(kind, str(words[0]), tuple(options), tuple(rest), words[0].line, command.environment))
        if kind in ("torchrun", "accelerate", "deepspeed") and rest and not _is_launcher(rest):
            found.append(_program(rest, command))
            break
        words = rest
    trains = any(layer.kind != "srun" for layer in found) and any(layer.options for layer in found)
    return tuple(found) if trains or any(layer.kind == "program" and _runs_file(layer) for layer in found) else ()


def _runs_file(layer: Layer) -> bool:
    return any(re.search(r"\.(ya?ml|json|toml)$", str(w)) for w in layer.words)


def _base(word: Text) -> str:
    return str(word).rpartition("/")[2]


def _is_launcher(words: Sequence[Text]) -> bool:
    return _launcher(words)[0] not in ("", "program")


def _launcher(words: Sequence[Text]) -> tuple[str, int]:
    """The kind of program that the words begin with, and how many words name it."""
    first = _base(words[0])
    if re.fullmatch(r"[A-Za-z_]\w*=.*", str(words[0]), re.DOTALL) and len(words) > 1:
        kind, n = _launcher(words[1:])
        return kind, n + 1
    if first in ("srun", "sbatch", "salloc"):
        return "srun", 1
    if first in ("mpirun", "mpiexec", "orterun"):
        return "mpirun", 1
    if first in (
        "env",
        "numactl",
        "timeout",
        "stdbuf",
        "nsys",
        "ncu",
        "poetry",
        "uv",
        "pixi",
        "conda",
        "singularity",
        "apptainer",
        "docker",
        "enroot",
        "uvx",
        "ssh",
        "pdsh",
        "ray",
        "catchsegv",
        "taskset",
        "nice",
        "xvfb-run",
    ):
        return _inner(words)
    if first.startswith("torchrun"):
        return "torchrun", 1
    if first in ("accelerate", "accelerate-launch"):
        return (
            ("accelerate", 2)
            if first == "accelerate" and len(words) > 1 and str(words[1]) == "launch"
            else ("accelerate", 1)
            if "-" in first
            else ("", 0)
        )
    if first == "deepspeed":
        return "deepspeed", 1
    if PYTHON.match(str(words[0])):
        return _module(words)
    if str(words[0]).startswith("-"):
        return "program", 0
    known = first.endswith((".py", ".sh")) or first in RUNNERS
    if known or (any(str(w).startswith("--") for w in words) and not words[0].open):
        return "program", 0
    return _inner(words)


def _module(words: Sequence[Text]) -> tuple[str, int]:
    """``python -u -m torch.distributed.run`` is torchrun, ``python -m deepspeed...`` and ``-m accelerate...`` likewise."""
    for i, word in enumerate(words[1:5], 1):
        if str(word) == "-m" and i + 1 < len(words):
            module = str(words[i + 1])
            if module in TORCHRUN_MODULES:
                return "torchrun", i + 2
            if module.startswith("accelerate.commands.launch"):
                return "accelerate", i + 2
            if module.startswith("deepspeed.launcher"):
                return "deepspeed", i + 2
            return "python", 1
        if not str(word).startswith("-"):
            break
    return "python", 1


def _inner(words: Sequence[Text]) -> tuple[str, int]:
    """A wrapper, or an open word such as ``$LAUNCHER``: the first launcher behind it."""
    for i in range(1, min(len(words), 60)):
        base = _base(words[i])
        if base.startswith("torchrun") or base in ("deepspeed", "accelerate") or PYTHON.match(str(words[i])):
            kind, n = _launcher(words[i:])
            if kind and kind != "program":
                return kind, n + i
        if base.endswith(".py"):
            return "program", 0
    return "", 0


def _options(words: Sequence[Text], bare: set[str]) -> tuple[list[Option], list[Text]]:
    """The options before the first word that is none, and what is left."""
    found: list[Option] = []
    i = 0
    while i < len(words):
        word = str(words[i])
        if not re.match(r"^--?[A-Za-z]", word):
            break
        name, equals, value = word.lstrip("-").partition("=")
        line = words[i].line
        i += 1
        if equals:
            found.append(Option(name, (_piece(words[i - 1], value),), line))
        elif name.replace("_", "-") in bare and not (name == "m" and i < len(words)):
            found.append(Option(name, (), line))
        elif name == "m" or (i < len(words) and not re.match(r"^--?[A-Za-z]", str(words[i]))):
            found.append(Option(name, (words[i],) if i < len(words) else (), line))
            i += 1
            if name == "m" and bare is not BARE["python"]:
                i -= 1  # the module is the program
        else:
            found.append(Option(name, (), line))
    return found, list(words[i:])


def _piece(word: Text, value: str) -> Text:
    """The value behind ``=``; open as the word is."""
    return Text(((value, word.line, word.open),))


def _program(words: Sequence[Text], command: Command) -> Layer:
    """A program's options may have any number of values: whatever stands up to the next option."""
    start = next((i for i, w in enumerate(words) if _base(w).endswith(".py") or not w.open), 0)
    first = words[start]
    options: list[Option] = []
    plain: list[Text] = []
    values: list[Text] | None = None
    heads: list[tuple[str, int, list[Text]]] = []
    for word in words[start:] if str(first).startswith("-") else [first, *words[start + 1 :]]:
        hit = re.match(r"^(--?[A-Za-z][\w.\-/]*)(=?)(.*)$", str(word), re.DOTALL)
        if hit:
            values = [_piece(word, hit.group(3))] if hit.group(2) else []
            heads.append((hit.group(1).lstrip("-"), word.line, values))
            if hit.group(2):
                values = None
        elif values is None or OVERRIDE.match(str(word)):
            plain.append(word)
        else:
            values.append(word)
    options = [Option(n, tuple(v), line) for n, line, v in heads]
    name = str(plain[0]) if plain else str(first)
    lost = str(command.words[0]).startswith("-")
    return Layer("program", name, tuple(options), tuple(plain), first.line, command.environment, lost)


def document(name: str, text: str, layer: Layer, label: Sequence[str] = ()) -> Document:
    """The options of one layer as data: dotted options and ``a.b=c`` words are nested, a repeated option is a problem."""
    data: dict[str, object] = {}
    lines: dict[Path, int] = {}
    pairs: list[tuple[Path, object, int]] = [(_path(o.name), _value(o.values), o.line) for o in layer.options]
    words = list(layer.words[1:])
    for word in words:
        hit = re.match(r"^[+~]{0,2}([A-Za-z_][\w.\-/@]*)=(.*)$", str(word), re.DOTALL)
        if hit:
            pairs.append((_path(hit.group(1)), hit.group(2), word.line))
    swallowed = [w for w in [*words, *(v for o in layer.options for v in o.values)] if str(w).startswith("#")]
    problems = [
        Problem("comment-argument", f"{str(w)[:40]!r} inside quotes is no comment: the program gets it as an argument", w.line)
        for w in swallowed
    ]
    for path, value, line in pairs:
        if path in lines:
            dotted = ".".join(map(str, path))
            problems.append(
                Problem("duplicate-key", f"--{dotted} is given twice (first on line {lines[path]}); the last wins", line, path=path)
            )
        if _nest(data, path, value):
            lines[path] = line
    if layer.lost:
        first = " ".join(str(w) for w in layer.words)[:40] or f"--{layer.options[0].name}"
        problems.append(Problem("lost-arguments", f"{first} begins a command of its own: the line before does not go on", layer.line))
    part = layer.name.rpartition("/")[2] or layer.kind
    part += f" ({', '.join(label)})" if label else ""
    return Document(name, text, "shell", data, lines, tuple(problems), parent=name, part=part, detail=layer)


def _path(name: str) -> Path:
    return tuple(p for p in name.split(".") if p) or (name,)


def _value(values: Sequence[Text]) -> object:
    found = [str(v) for v in values if not str(v).startswith("#") and str(v).strip() != "\\"]
    found = [v[1:-1] if len(v) > 1 and v[0] == v[-1] and v[0] in "\"'" else v for v in found]
    return True if not found else found[0] if len(found) == 1 else found


def _nest(data: dict[str, object], path: Path, value: object) -> bool:
    here = data
    for key in path[:-1]:
        below: object = here.setdefault(str(key), {})
        if not isinstance(below, dict):
            below = {"": below}
            here[str(key)] = below
        here = below
    if isinstance(here.get(str(path[-1])), dict) and not isinstance(value, dict):
        return False
    here[str(path[-1])] = value
    return True
