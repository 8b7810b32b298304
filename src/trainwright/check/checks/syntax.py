"""K08, K09: files that parse, keys that stand once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ..document import Document, Problem
from ..findings import Check, Example, Finding, Severity
from ..setup import Place, Setup
from ..view import View, as_number
from ._tools import BLOCKED, ERROR, NOTE, WARNING, said

# Kinds of `document.KINDS`: what they mean for a run.
PARSE: Mapping[str, tuple[Severity, str]] = {
    "broken": (ERROR, "The engine's parser stops here."),
    "unclosed": (ERROR, "The shell or parser reads on to the end of the file."),
    "merge-marker": (ERROR, "Resolve the conflict."),
    "binary": (ERROR, "Give the text file."),
    "too-large": (ERROR, "Give the configuration, not the data."),
    "anchors": (ERROR, "Write the values out."),
    "tab": (ERROR, "Indent with spaces."),
    "comma": (ERROR, "Mend the comma."),
    "number": (ERROR, "Write the number without underscores."),
    "arithmetic": (ERROR, "Write numbers that the shell can compute with."),
    "lost-arguments": (ERROR, "Add the backslash, or move the comment behind the command."),
    "comment-argument": (WARNING, "Move the comment out of the quotes."),
    "continuation": (WARNING, "Remove the last backslash."),
    "header": (ERROR, "Move the directives above the first command."),
    "template": (NOTE, "Render it first, then check what comes out."),
    "placeholder": (BLOCKED, "Substitute it, then check what comes out."),
    "tag": (NOTE, ""),
    "comment": (NOTE, "Remove the comment: strict JSON readers refuse it."),
    "encoding": (NOTE, "Save it as UTF-8."),
    "utf-16": (ERROR, "Save it as UTF-8."),
    "bom": (NOTE, "Save it without a byte order mark."),
}
READ_RELAXED = ("gpt_neox",)  # engines that read JSON-like files through YAML


def documents(setup: Setup) -> Iterator[Document]:
    """Every document once, parts of files too."""
    seen: set[int] = set()
    for reading in setup.readings:
        if id(reading.document) not in seen:
            seen.add(id(reading.document))
            yield reading.document


def parses(setup: Setup) -> Iterator[Finding]:
    for document in documents(setup):
        formats = {r.format for r in setup.readings if r.document is document}
        for problem in document.problems:
            found = _parse(document, problem, formats)
            if found is not None:
                yield found
        if document.syntax == "shell" and document.parent is None:
            yield from _shell(document)


def _parse(document: Document, problem: Problem, formats: set[str]) -> Finding | None:
    if problem.kind not in PARSE:
        return None
    severity, mend = PARSE[problem.kind]
    strict_json = document.syntax == "json" and "gpt_neox" not in formats
    if problem.kind == "number" and document.syntax != "json":
        return None
    if problem.kind == "comment" and (not strict_json or "deepspeed" not in formats):
        severity = NOTE
    if problem.kind == "placeholder" and document.parent is not None:
        severity = NOTE
    if problem.fatal and severity < ERROR and problem.kind not in ("template",):
        severity = ERROR
    return Finding("K08", severity, Place(document.name, problem.line, problem.path), _sentence(problem.message), mend)


def _sentence(message: str) -> str:
    text = message.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


DIRECTIVE = re.compile(r"#SBATCH\s+-")


def _shell(document: Document) -> Iterator[Finding]:
    """What a shell accepts and a person does not mean."""
    lines = document.text.splitlines()
    first = next((i for i, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")), None)
    headed = any(DIRECTIVE.match(line) for line in lines[: first or 0])
    late = next((i for i, line in enumerate(lines, 1) if first and i > first and DIRECTIVE.match(line)), None)
    if first and late:
        yield Finding(
            "K08",
            ERROR,
            Place(document.name, late),
            f"#SBATCH stands behind the first command (line {first}): Slurm stops reading there and ignores it.",
            "Move it to the top.",
        )
    for i, line in enumerate(lines, 1):
        bare = line.strip()
        if bare.startswith('"""') or bare.startswith("'''"):
            yield Finding(
                "K08",
                ERROR,
                Place(document.name, i),
                "A Python docstring in a shell script: the shell runs it as a command.",
                "Write it as comments, or : <<'EOF'.",
            )
            break
    for i, line in enumerate(lines, 1):
        if headed and line.strip() == "sbatch":
            yield Finding(
                "K08",
                ERROR,
                Place(document.name, i),
                "A bare sbatch inside the job: it reads a script from standard input and submits nothing.",
                "Remove it.",
            )
    last = max((i for i, line in enumerate(lines, 1) if line.strip()), default=0)
    if last and lines[last - 1].rstrip().endswith("\\") and not lines[last - 1].lstrip().startswith("#"):
        yield Finding(
            "K08",
            WARNING,
            Place(document.name, last),
            "The last line ends with a continuation: the next line that is added becomes an argument.",
            "Remove the backslash.",
        )
    for i, line in enumerate(lines[:-1], 1):
        if re.search(r"\\[ \t]+$", line) and not line.lstrip().startswith("#"):
            yield Finding(
                "K08",
                ERROR,
                Place(document.name, i),
                "A blank behind the backslash: the command ends here and its other arguments become a command of their own.",
                "Remove the blank.",
            )
    yield from _heredocs(document, lines)
    yield from _unchained(document, lines)
    yield from _blocks(document, lines)


def _heredocs(document: Document, lines: list[str]) -> Iterator[Finding]:
    """A continuation before the end of a here-document swallows its last line."""
    opened = re.compile(r"<<-?\s*['\"]?([A-Za-z_]\w*)['\"]?")
    end: str | None = None
    for i, line in enumerate(lines, 1):
        if end is None:
            hit = opened.search(line)
            end = hit.group(1) if hit and not line.lstrip().startswith("#") and "<<<" not in line else None
        elif line.strip() == end:
            if i > 1 and lines[i - 2].rstrip().endswith("\\"):
                yield Finding(
                    "K08",
                    WARNING,
                    Place(document.name, i - 1),
                    "A continuation behind the last argument of a here-document: what stands behind it is joined on.",
                    "Remove the backslash.",
                )
            end = None


FLAG = re.compile(r"\s*(--[A-Za-z][\w-]*)(?=[\s=\\]|$)")


def _unchained(document: Document, lines: list[str]) -> Iterator[Finding]:
    """A line that begins with a flag, behind one that does not continue."""
    depth: str | None = None
    quoted = False
    for i, line in enumerate(lines, 1):
        here = re.search(r"<<-?\s*['\"]?([A-Za-z_]\w*)['\"]?", line)
        if depth is not None:
            depth = None if line.strip() == depth else depth
            continue
        if here and "<<<" not in line and not line.lstrip().startswith("#"):
            depth = here.group(1)
        before = lines[i - 2].rstrip() if i > 1 else ""
        flag = FLAG.match(line)
        if (
            flag
            and before
            and not before.endswith(("\\", "(", '"', "'", "|", "&"))
            and not quoted
            and not _in_array(lines, i)
            and not before.lstrip().startswith("#")
        ):
            if i > 2 and (FLAG.match(lines[i - 2]) or lines[i - 3].rstrip().endswith("\\")):
                yield Finding(
                    "K08", ERROR, Place(document.name, i), f"{flag.group(1)} is lost: the line above does not end with a "
                    f"backslash, so the command ended there.",
                    "Add the backslash to the line above.",
                )  # fmt: skip
                return
        elif (
            FLAG.match(line)
            and before.lstrip().startswith("#")
            and i > 2
            and lines[i - 3].rstrip().endswith("\\")
            and not quoted
            and not _in_array(lines, i)
        ):
            yield Finding(
                "K08",
                ERROR,
                Place(document.name, i),
                "A comment inside a continued command: what follows it is lost.",
                "Move the comment out of the command.",
            )
            return
        if len(re.findall(r'(?<!\\)"', re.sub(r"'[^']*'", "", line.split(" #")[0]))) % 2:
            quoted = not quoted


def _in_array(lines: list[str], number: int) -> bool:
    """Whether the line stands between ``NAME=(`` and its ``)``."""
    for line in reversed(lines[: number - 1]):
        if re.match(r"\s*(?:export\s+|declare\s+-a\s+|local\s+)?\w+\+?=\(", line):
            return ")" not in re.sub(r"\$\([^)]*\)|#.*", "", line.split("=(", 1)[1])
        if line.strip().startswith(")") or line.strip() == ")":
            return False
    return False


def _blocks(document: Document, lines: list[str]) -> Iterator[Finding]:
    """if without then: bash stops, or reads the next then as its own."""
    for i, line in enumerate(lines, 1):
        bare = line.split(" #")[0].strip()
        if re.match(r"(?:el)?if\b", bare) and not re.search(r"\bthen\b", bare) and not bare.endswith(("\\", "&&", "||", "|")):
            following = next((x.strip() for x in lines[i:] if x.strip() and not x.strip().startswith("#")), "")
            if (
                not following.startswith("then")
                and re.match(r"(?:el)?if\s+(?:!\s*)?[\[(]", bare)
                and not re.match(r"^(\[\[|&&|\|\||\(|\[|-)", following)
            ):
                yield Finding(
                    "K08",
                    ERROR,
                    Place(document.name, i),
                    f"{bare.split()[0]} without then: bash refuses the script, or takes a later then for it.",
                    "Add then.",
                    (),
                )
                return


def twice(setup: Setup) -> Iterator[Finding]:
    for document in documents(setup):
        formats = {r.format for r in setup.readings if r.document is document}
        for problem in document.problems:
            if problem.kind == "duplicate-key":
                strict = "deepspeed" in formats and document.syntax == "json"
                script = document.syntax == "shell"
                yield Finding(
                    "K09", ERROR if strict else NOTE if script else WARNING, Place(document.name, problem.line, problem.path), _sentence(problem.message),
                    "Remove one of them" + ("; DeepSpeed refuses duplicate keys." if strict else ": which one counts depends on the reader, usually the last."),
                )  # fmt: skip
    for view in setup.seen("megatron"):
        yield from _same_meaning(view)


ONE_MEANING = (
    ("encoder_seq_length", "seq_length"),
    ("train_iters", "train_samples"),
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
)


def _same_meaning(view: View) -> Iterator[Finding]:
    """Two options that are one value under two names: Megatron asserts that only one is given."""
    if view.document.syntax != "shell" and view.document.parent is None:
        return
    for group in ONE_MEANING:
        given = [k for k in (view.get(n) for n in group) if k is not None and as_number(k.value) not in (None, 0.0)]
        if len(given) > 1:
            yield said(
                view, given[1], "K09", ERROR if "seq" in group[0] or "train" in group[0] else WARNING,
                f"{given[0].path[-1]} and {given[1].path[-1]} say the same value twice: Megatron takes one of them.", f"Remove {given[1].path[-1]}.",
            )  # fmt: skip


CHECK = (
    Check(
        "K08", "the file parses, and means what it looks like", parses,
        Example({"ds_config.json": '{\n  "train_micro_batch_size_per_gpu": 1,\n  "train_batch_size": 1_024,\n  "zero_optimization": {"stage": 2}\n}\n'}),
        "error where the parser stops or arguments are lost; 'cannot run as written' for a placeholder where a value should stand; note for a template",
        "jinja in a block scalar, JSON with comments that its engine reads as YAML",
    ),
    Check(
        "K09", "keys and flags stand once", twice,
        Example({"args.yaml": "model_name_or_path: gpt2\ngradient_checkpointing: true\nper_device_train_batch_size: 4\n"
            "gradient_accumulation_steps: 2\nlearning_rate: 2.0e-5\ngradient_checkpointing: false\noutput_dir: out\n"}),
        "error where the engine refuses; warning in files; note in scripts, where defaults are overridden on purpose",
    ),
)  # fmt: skip
