"""K10, K19, K29, K40: files that exist, variables that are set and expanded, interpolations that resolve, placeholders that are replaced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path as File

from ...errors import nearest
from ..document import Document
from ..findings import Check, Example, Finding
from ..setup import Place, Setup
from ..view import View, _leaves
from ._tools import BLOCKED, ERROR, NOTE, WARNING
from .syntax import documents

USE = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_]\w*)(?P<rest>[^}]*)\}|(?P<bare>[A-Za-z_]\w*))")
SET = re.compile(
    r"(?:^|[\s;&|(`'\"])(?:export\s+|declare\s+(?:-\w+\s+)*|local\s+|readonly\s+|typeset\s+)?([A-Za-z_]\w*)(?:\[[^\]]*\])?\+?=(?!=)"
    r"|\bread\s+(?:-\w+\s+(?:''\s+)?)*([A-Za-z_]\w*)|\bfor\s+([A-Za-z_]\w*)\s+in\b|\bgetopts\s+\S+\s+([A-Za-z_]\w*)|\bmapfile\s+(?:-\w+\s+)*([A-Za-z_]\w*)"
    r"|\breadarray\s+(?:-\w+\s+)*([A-Za-z_]\w*)|\bprintf\s+-v\s+([A-Za-z_]\w*)"
)  # fmt: skip
# What a shell, a scheduler, a launcher or a cloud sets before a script runs.
GIVEN = re.compile(
    "^("
    + "|".join(
        """
        SLURM\\w* PBS\\w* LSB\\w* SGE\\w* COBALT\\w* OMPI\\w* PMI\\w* PMIX\\w* MPI\\w* CUDA\\w* NVIDIA\\w* NCCL\\w* RCCL\\w* HIP\\w* ROCR?\\w* HF_\\w+ HOME PATH
        USER PWD OLDPWD SHELL HOSTNAME HOST TMPDIR TMP TEMP LANG LC_\\w+ LD_\\w+ PYTHON\\w* CONDA\\w* VIRTUAL_ENV RANDOM SECONDS LINENO BASH\\w* PS\\d IFS
        UID EUID PPID REPLY OPTARG OPTIND FUNCNAME PIPESTATUS HISTFILE TERM DISPLAY RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK
        MASTER_ADDR MASTER_PORT WANDB\\w* SKYPILOT\\w* AWS\\w* AZ\\w+ GOOGLE\\w* GCP\\w* TPU\\w* SCRATCH WORK STORE PROJECT SINGULARITY\\w* APPTAINER\\w*
        XDG\\w* LOGNAME MAIL EDITOR HOSTFILE PADDLE\\w* VC_\\w+ ARNOLD\\w* MLP_\\w+ BATCH_\\w+ JOB_ID PJM\\w* KUBERNETES\\w* POD_\\w+ six_\\w+ http_proxy
        https_proxy no_proxy NODELIST ARRAY_TASK_ID TASK_ID EPOCHREALTIME EPOCHSECONDS OSTYPE MACHTYPE HOSTTYPE SHLVL DIRSTACK GROUPS
        """.split()  # noqa: SIM905
    )
    + ")$"
)


def undefined(setup: Setup) -> Iterator[Finding]:
    for document in documents(setup):
        if document.syntax == "shell" and document.parent is None:
            yield from _script(document)
    for view in setup.seen("accelerate", "deepspeed", "trainer", "trl", "llama_factory", "axolotl"):
        if view.document.syntax in ("yaml", "json") and view.document.parent is None:
            yield from _unexpanded(view)


def _code(text: str) -> list[str]:
    """The lines without comments and without what stands in single quotes."""
    lines = []
    for line in text.splitlines():
        bare = "" if line.lstrip().startswith("#") else re.sub(r"(?<=[\s;])#(?!\{).*$", "", line)
        lines.append(re.sub(r"(?<![\w\"'])'[^']*'", "''", bare) if bare.count("'") % 2 == 0 else bare)
    return lines


def _script(document: Document) -> Iterator[Finding]:
    lines = _code(document.text)
    text = "\n".join(lines)
    assigned = {name for groups in SET.findall(document.text) for name in groups if name}
    sourced = bool(re.search(r"(?m)^\s*(?:source|\.)\s+\S", text)) or "eval " in text
    reported: set[str] = set()
    for number, line in enumerate(lines, 1):
        for hit in USE.finditer(line):
            name = hit.group("braced") or hit.group("bare")
            rest = hit.group("rest") or ""
            if (
                name in assigned
                or name in reported
                or GIVEN.match(name)
                or rest[:1] in (":", "-", "+", "=", "?")
                or _escaped(line, hit.start())
                or _tested(text, name)
            ):
                continue
            reported.add(name)
            near = [n for n in nearest(name, assigned, 1) if _alike(n, name)]
            if near:
                yield Finding(
                    "K19",
                    ERROR,
                    Place(document.name, number),
                    f"${name} is never set; ${near[0]} is. The shell puts nothing there.",
                    f"Call it ${near[0]}.",
                )
            elif _matters(line, name):
                place = Place(document.name, number)
                if sourced:
                    yield Finding("K19", NOTE, place, f"${name} is not set here; it must come from a file that is sourced.")
                else:
                    yield Finding(
                        "K19",
                        BLOCKED if name.isupper() else WARNING,
                        place,
                        f"${name} is never set here: the shell puts nothing there.",
                        f"Set {name}, or write ${{{name}:?}} to stop where it is missing.",
                    )
    yield from _counts(document, lines, assigned)
    yield from _unused(document, lines, assigned)


def _tested(text: str, name: str) -> bool:
    """A script that tests whether the variable is set expects it from outside."""
    return bool(re.search(rf"-[zn]\s+[\"']?\$\{{?{name}\b|\$\{{{name}[:+?=-]", text))


def _escaped(line: str, at: int) -> bool:
    return at > 0 and line[at - 1] == "\\"


def _alike(other: str, name: str) -> bool:
    """The same letters without underscores, or a letter apart in a long name."""
    from .keys import _distance

    flat = lambda s: s.replace("_", "").lower()  # noqa: E731
    if other == name or [c for c in other if c.isdigit()] != [c for c in name if c.isdigit()]:
        return False
    return flat(other) == flat(name) or (min(len(other), len(name)) >= 6 and _distance(other, name) <= (1 if len(name) < 10 else 2))


def _matters(line: str, name: str) -> bool:
    return not re.match(r"\s*(?:echo|printf|mkdir|cd|ls)\b", line)


# Counts that a launcher multiplies: a variable that only a scheduler of one kind gives.
ONLY_WHEN_ASKED = {
    "SLURM_NTASKS_PER_NODE": r"#SBATCH\s+--ntasks-per-node", "SLURM_GPUS_PER_NODE": r"#SBATCH\s+--gpus-per-node", "SLURM_GPUS": r"#SBATCH\s+(?:--gpus|-G)\b",
    "SLURM_CPUS_PER_TASK": r"#SBATCH\s+(?:--cpus-per-task|-c)\b", "SLURM_GPUS_ON_NODE": r"#SBATCH\s+.*gpu",
}  # fmt: skip


def _counts(document: Document, lines: list[str], assigned: set[str]) -> Iterator[Finding]:
    """Slurm's variables that exist only where their option was given; and one task's number taken for a number of GPUs."""
    slurm = re.search(r"(?m)^#SBATCH\s", document.text)
    for number, line in enumerate(lines, 1):
        for name, option in ONLY_WHEN_ASKED.items():
            if slurm and re.search(rf"\$\{{?{name}\b(?!:)", line) and name not in assigned and not re.search(option, document.text):
                yield Finding(
                    "K19",
                    WARNING,
                    Place(document.name, number),
                    f"${name} exists only where its option is given, and the header does not give it.",
                    f"Add the #SBATCH option, or write ${{{name}:-1}}.",
                )
        if slurm and re.search(r"nproc[_-]per[_-]node[= ]+\$\{?SLURM_NTASKS_PER_NODE", line):
            yield Finding(
                "K19", ERROR, Place(document.name, number),
                "The number of processes is SLURM_NTASKS_PER_NODE, the number of launchers: one process a node starts where one launcher "
                "does. No variable here holds the GPUs of a node.",
                "Set GPUS_PER_NODE and use it.",
            )  # fmt: skip


ALLOCATOR = ("expandable_segments", "max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions", "backend",
    "pinned_use_cuda_host_register", "roundup_bypass_threshold_mb",
             "release_lock_on_cudamalloc", "pinned_num_register_threads", "graph_capture_record_stream_reuse", "pinned_use_background_threads",
                 "per_process_memory_fraction")  # fmt: skip
UNREAD = {
    "PYTORCH_NO_CUDA_MEMORY_MANAGEMENT": "PYTORCH_NO_CUDA_MEMORY_CACHING", "TORCH_DISTRIBUTED_TIMEOUT": "init_process_group(timeout=...)",
        "NCCL_TIMEOUT": "init_process_group(timeout=...)",
    "PYTHONBUFFERED": "PYTHONUNBUFFERED", "PYTORCH_CUDA_ALLOC_CONFIG": "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICE": "CUDA_VISIBLE_DEVICES",
        "NCCL_SOCKET_IFNAMES": "NCCL_SOCKET_IFNAME",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREAD": "OMP_NUM_THREADS",
        "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT", "NCCL_IB_DISABLED": "NCCL_IB_DISABLE",
}  # fmt: skip


def _unused(document: Document, lines: list[str], assigned: set[str]) -> Iterator[Finding]:
    """Environment variables that nobody reads."""
    for number, line in enumerate(lines, 1):
        hit = re.match(r"\s*export\s+([A-Z_]+)=(\S*)", line)
        if hit and hit.group(1) in UNREAD:
            replaced = UNREAD[hit.group(1)]
            soft = hit.group(1) in ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT")
            yield Finding(
                "K19",
                NOTE if soft else WARNING,
                Place(document.name, number),
                f"{hit.group(1)} is read by nothing" + (" in current PyTorch." if soft else "."),
                f"{replaced} is.",
            )


def _unexpanded(view: View) -> Iterator[Finding]:
    """A shell variable in a file that its engine reads as it stands."""
    for key in _leaves(view.document.data, ()):
        if (
            isinstance(key.value, str)
            and "\n" not in key.value
            and (hit := re.search(r"\$\{?([A-Z_][A-Z0-9_]*)(:-[^}]*)?\}?", key.value))
            and view.format != "axolotl"
        ):
            yield Finding(
                "K19", ERROR if view.format in ("accelerate", "deepspeed") else WARNING, view.place(key.path),
                f"{key.path[-1]} is {key.value!r}: {view.format} reads the file as it stands and expands no variable.", f"Give the value on "
                f"the launch line, or run the file through envsubst (which knows no "
                f"{hit.group(2) or ':-default'})." if hit.group(2) else "Give the value on the launch line, or run the file through envsubst.",
            )  # fmt: skip
            return


def interpolations(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen():
        for document in (view.document,):
            for path in view.reading.open:
                value = _at(document.data, path)
                if (
                    isinstance(value, str)
                    and (hit := re.fullmatch(r"\s*\$\{([A-Za-z_][\w.]*)\}\s*", value))
                    and "." in hit.group(1)
                    and view.format in ("nemo", "llm_foundry", "torchtune", "automodel")
                ):
                    first = hit.group(1).split(".")[0]
                    data = document.data if isinstance(document.data, dict) else {}
                    severity = ERROR if first in data else NOTE
                    yield Finding(
                        "K29", severity, view.place(path), f"{value.strip()} points at "
                        f"nothing" + (" in this file: Hydra stops." if severity is ERROR else " in this file; another one must hold it."),
                        "Name a key that exists." if severity is ERROR else "",
                    )  # fmt: skip


def _at(data: object, path: tuple[str | int, ...]) -> object:
    for part in path:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


PLACEHOLDER = re.compile(
    r"/path/to\b|path/to/|<\s*(?:your|specify|path|insert|fill|replace)[^>]*>|\b(?:YOUR|MY)_[A-Z_]+\b|\bREPLACE_?ME\b|\bCHANGE_?ME\b|"
    r"\{your[^}]*\}|/YOUR/|your[-_](?:model|data|path|token|wandb|username)",
    re.IGNORECASE,
)


def placeholders(setup: Setup) -> Iterator[Finding]:
    for document in documents(setup):
        if document.parent is not None:
            continue
        hits = [
            (number, hit.group(0)) for number, line in enumerate(document.text.splitlines()[:5000], 1)
            if not re.match(r"\s*(?:#|//)", line) and (hit := PLACEHOLDER.search(re.sub(r"\s#\s.*$", "", line)))
        ]  # fmt: skip
        if hits:
            more = f" and {len(hits) - 1} more" if len(hits) > 1 else ""
            yield Finding(
                "K40", NOTE, Place(document.name, hits[0][0]), f"{hits[0][1]} is a placeholder{more}: it must be replaced before this runs."
            )


SCRIPT = re.compile(r"(?:python3?\s+(?:-\w+\s+)*|torchrun\s+.*?\s|accelerate\s+launch\s+.*?\s|deepspeed\s+.*?\s)([\w./-]+\.py)\b")


def files(setup: Setup) -> Iterator[Finding]:
    """Files that a file refers to, among those that were given; on disk only where the file itself is."""
    given = sorted({File(r.document.name).name for r in setup.readings})
    for document in documents(setup):
        home = File(document.name)
        if document.parent is not None:
            continue
        for number, line in enumerate(document.text.splitlines()[:5000], 1):
            for name in (n for n in _named(line) if "$" not in n and File(n).name not in given):
                near = [
                    g
                    for g in nearest(File(name).name, given, 1)
                    if _alike(g.rsplit(".", 1)[0], File(name).name.rsplit(".", 1)[0]) and g != home.name
                ]
                if near:
                    yield Finding(
                        "K10",
                        ERROR,
                        Place(document.name, number),
                        f"{name} is not among the files that were given; {near[0]} is.",
                        f"Call it {near[0]}.",
                    )
        if not home.is_file():
            continue
        for number, line in enumerate(document.text.splitlines()[:5000], 1):
            for name in _named(line):
                if "$" in name or name.startswith(("/", "~", "http")) or "{" in name or File(name).name in {File(g).name for g in given}:
                    continue
                places = [base / name for base in (home.parent, *list(home.parent.parents)[:4])]
                if not any(p.exists() for p in places):
                    root = next((p for p in home.parents if (p / ".git").exists()), None)
                    if root is not None:
                        yield Finding(
                            "K10",
                            ERROR,
                            Place(document.name, number),
                            f"{name} does not exist beside this file or above it.",
                            "Name a file that exists.",
                        )


REFERENCE = re.compile(
    r"(?:--(?:deepspeed|deepspeed_config|config_file|config)[= ]+|\bdeepspeed_config_file:\s*|\bdeepspeed:\s*)[\"']?([\w./-]+\.(?:json|ya?ml|toml))"
)


def _named(line: str) -> list[str]:
    if line.lstrip().startswith(("#", "//")):
        return []
    return [*SCRIPT.findall(line), *REFERENCE.findall(line)]


_TRAIN = (
    "#!/bin/bash\n{}torchrun --nproc_per_node {} train.py --model_name_or_path gpt2 \\\n  --per_device_train_batch_size 4 "
    "--gradient_accumulation_steps 2 --learning_rate 2e-5 --output_dir {}\n"
)
CHECK = (
    Check(
        "K10", "files that are referred to exist", files,
        Example({"train.sh": _TRAIN.format("", 8, "out --deepspeed "
            "configs/ds_zero_3.json"), "ds_zero3.json": '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}\n'}),
        "error, where another file that was given is nearly called so, or the file lies in a repository that does not hold "
        "the other", "a path that only exists where the job runs",
    ),
    Check(
        "K19", "variables are set, spelt right, and somebody expands them", undefined, Example({"train.sh": _TRAIN.format("OUTPUT_DIR=out\n", 8,
            "$OUTPUTDIR")}),
        "error for a name a letter away from one that is set and in files that expand nothing; 'cannot run as written' where nothing sets "
        "it; note where a sourced file may",
        "variables of schedulers and launchers, ${NAME:-default}, positional arguments",
    ),
    Check(
        "K29", "interpolations resolve", interpolations,
        Example({"gpt.yaml": "trainer:\n  devices: 8\n  num_nodes: 1\n  precision: bf16\n  max_steps: 1000\nmodel:\n  micro_batch_size: 1\n  "
            "global_batch_size: 64\n  tensor_model_parallel_size: 1\n"
                 "  pipeline_model_parallel_size: 1\n  encoder_seq_length: 2048\n  max_position_embeddings: "
                 "${model.encoder_sequence_length}\n  num_layers: 24\n  hidden_size: 1024\n  num_attention_heads: 16\n"}),
        "error where the file has the section and not the key; note where another file must hold it", "a root that the launcher adds, resolvers of a plugin",
    ),
    Check("K40", "placeholders left", placeholders, Example({"train.sh": _TRAIN.format("", 8, "/path/to/output")}), "note"),
)  # fmt: skip
