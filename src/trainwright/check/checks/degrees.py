"""K03, K14, K15, K24: what must divide what: world and degrees, layers and stages, heads and tensor parallelism, micro-batches and stages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from ..findings import Check, Example, Finding, Severity
from ..setup import Fact, Place, Setup
from ..view import View, as_number, whole
from ._tools import BLOCKED, ERROR, NOTE, WARNING, about, data_ranks, degree, few, put, said, world, world_place


def worlds(setup: Setup) -> Iterator[Finding]:
    total = world(setup)
    tp, pp, cp = (degree(setup, d) for d in ("tp", "pp", "cp"))
    ep, etp = degree(setup, "ep"), whole(setup.value("strategy.etp")) or (tp if setup.value("strategy.framework") == "megatron" else 1)
    need = tp * pp * cp
    fact = next((setup.fact(f"strategy.{d}") for d in ("tp", "pp", "cp") if degree(setup, d) > 1), None)
    for view in setup.views:
        yield from _launched_formula(view)
    if not total:
        return
    place = fact.place if fact else world_place(setup)
    words = f"tp {tp} x pp {pp}" + (f" x cp {cp}" if cp > 1 else "")
    if total % need:
        placeholder = total < need and _one_node(setup)
        yield Finding(
            "K03", BLOCKED if placeholder else ERROR, place,
            f"{words} = {need} does not divide the {total} processes that are started"
            + (f": {need // (whole(setup.value('launch.gpus_per_node')) or 8) or 1} nodes are needed, one is a placeholder." if placeholder else "."),
            f"Start a multiple of {need} processes, or lower a degree.",
        )  # fmt: skip
    elif ep > 1 and total % (ep * etp * pp):
        expert = setup.fact("strategy.ep")
        assert expert is not None
        yield about(
            expert, "K03", BLOCKED if total < ep * etp * pp and _one_node(setup) else ERROR,
            f"ep {ep} x etp {etp} x pp {pp} = {ep * etp * pp} does not divide the {total} processes that are started.",
            f"Start a multiple of {math.lcm(ep * etp * pp, need)} processes, or lower ep.",
        )  # fmt: skip
    else:
        yield from _product(setup, total, need)
        per_node = whole(setup.value("launch.gpus_per_node"))
        if total > 1 and total & (total - 1) and total % 8 and total < 8 and need == 1:
            yield Finding(
                "K03", NOTE, world_place(setup), f"{total} processes: legal, but batch sizes and shards that are powers of two are padded or do not divide."
            )  # fmt: skip
        if per_node and tp > per_node:
            yield Finding(
                "K03", WARNING, place, f"tp {tp} reaches over nodes of {per_node} GPUs: every layer's all-reduce goes over the network.",
                f"Keep tp at {per_node} or below and use pp or sharding across nodes.",
            )  # fmt: skip


def _one_node(setup: Setup) -> bool:
    """One node, or nothing said about nodes: what examples begin with and people replace."""
    nodes = setup.fact("launch.nodes")
    return (whole(nodes.value) if nodes else 1) == 1


def _product(setup: Setup, total: int, need: int) -> Iterator[Finding]:
    """A data-parallel degree that is said must be what is left."""
    fact = setup.fact("strategy.dp")
    dp = whole(fact.value) if fact else None
    if fact and dp and dp * need != total:
        yield about(
            fact, "K03", BLOCKED if dp * need > total and _one_node(setup) else ERROR,
            f"dp {dp} x tp x pp x cp {need} = {dp * need}, but {total} processes are started.", f"Start {dp * need} processes, or set dp to {total // need}.",
        )  # fmt: skip


# Flags and keys of a degree that the number of processes is a multiple of; and what people call such a variable where no flag tells.
DEGREES = {
    "tp": r"tensor[-_]model[-_]parallel[-_]size|tensor[-_]parallel[-_](?:size|degree)|tp[-_]size",
    "pp": r"pipeline[-_]model[-_]parallel[-_]size|pipeline[-_]parallel[-_](?:size|degree)|pp[-_]size",
    "cp": r"context[-_]parallel[-_](?:size|degree)|cp[-_]size",
}
NAMED = re.compile(r"(?P<axis>TP|PP|CP)(?:_SIZE|_DEGREE)?$", re.IGNORECASE)
PROCESSES = re.compile(r"nproc[-_]per[-_]node|num[-_]processes|ntasks(?:-per-node)?|WORLD_SIZE|NPROC\w*|N?GPUS\w*|NUM_GPUS\w*")


def _launched_formula(view: View) -> Iterator[Finding]:
    """A script that multiplies its process count out of degrees, and leaves one of them out that it also gives to the program."""
    text = view.document.text
    if view.document.syntax != "shell" or view.document.parent is not None or "$((" not in text:
        return
    variables = _degree_variables(text)
    for number, line in enumerate(text.splitlines(), 1):
        hit = None if line.lstrip().startswith("#") else re.search(r"([\w-]+)[= ]+\"?\$\(\(([^)]*)\)\)", line)
        if not hit or not PROCESSES.fullmatch(hit.group(1).lstrip("-")) or "*" not in hit.group(2):
            continue
        factors = {_through(text, n) for n in re.findall(r"[A-Za-z_]\w*", hit.group(2))}
        axes = {variables[f] for f in factors if f in variables}
        if not axes or len(factors) < 2:
            continue
        missing = next((n for n, axis in variables.items() if axis not in axes), None)
        if missing or "cp" not in axes:
            yield Finding(
                "K03", ERROR if missing else NOTE, Place(view.document.name, number),
                f"The process count is {hit.group(2).strip()}: {missing or 'context parallelism'} is not among its factors, so a run with it starts too "
                "few processes.", f"Multiply by {missing or 'it'}.",
            )  # fmt: skip


def _degree_variables(text: str) -> dict[str, str]:
    """{variable: axis} of what stands behind a degree's flag, or is called like one and set in the script."""
    found: dict[str, str] = {}
    for axis, flags in DEGREES.items():
        for hit in re.finditer(rf"--(?:{flags})[= ]+[\"']?\$\{{?(\w+)", text):
            found[_through(text, hit.group(1))] = axis
    for hit in re.finditer(r"(?m)^\s*(?:export\s+)?([A-Za-z_]\w*)=", text):
        named = NAMED.match(hit.group(1))
        if named and named["axis"].lower() not in found.values():
            found[hit.group(1)] = named["axis"].lower()
    return found


def _through(text: str, name: str) -> str:
    """The variable that this one only repeats: ``ETP=${TP}``."""
    for _ in range(4):
        hit = re.search(rf"(?m)^\s*(?:export\s+)?{name}=[\"']?\$\{{?([A-Za-z_]\w*)\}}?[\"']?\s*$", text)
        if hit is None or hit.group(1) == name:
            return name
        name = hit.group(1)
    return name


def layers(setup: Setup) -> Iterator[Finding]:
    """Layers over pp x virtual stages, unless slots, a layout or an uneven split say how."""
    fact = setup.fact("model.num_hidden_layers")
    count, pp = whole(fact.value) if fact else None, degree(setup, "pp")
    for view in setup.views:
        yield from _lists(view, count)
    if fact is None or not count or pp < 2:
        return
    if any(v.get(*UNEVEN) and v.value(*UNEVEN) not in (None, "", "null") for v in setup.views):
        return
    virtual = whole(setup.value("strategy.virtual_stages")) or 1
    chunks, slots = pp * virtual, 0
    for view in setup.views:
        slots += int(view.on("account_for_embedding_in_pipeline_split")) + int(view.on("account_for_loss_in_pipeline_split"))
        if "embedding" in str(view.value("pp_partition_method") or ""):
            slots = 2
    if (count + slots) % chunks == 0:
        return
    if count < pp and setup.value("strategy.framework") in ("megatron", None):
        yield about(fact, "K14", ERROR, f"{count} layers over {pp} pipeline stages leave stages empty.", f"Use pp {few(_divisors(count))}.")
    elif setup.value("strategy.framework") == "megatron" and not any(v.on("deepspeed") or v.get("deepspeed_config") for v in setup.views):
        yield about(
            fact, "K14", ERROR,
            f"{count} layers do not divide over {pp} stages" + (f" x {virtual} virtual stages" if virtual > 1 else "") + ": Megatron stops.",
            f"Use pp {few(_divisors(count))}, or say how many the first and last stage hold (--decoder-first-pipeline-num-layers).",
        )  # fmt: skip
    else:
        yield about(fact, "K14", NOTE, f"{count} layers over {chunks} stages are uneven: the longest stage sets the pace.")


UNEVEN = (
    "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "custom_pipeline_layers", "layers_per_stage",
    "module_fqns_per_model_part", "pipeline_parallel_layers_per_stage", "pipeline_parallel_split_points",
)  # fmt: skip
COUNTS_OF_LAYERS = (
    "cpu_offloading_num_layers", "activations_checkpoint_num_layers", "recompute_num_layers", "activation_offload_num_layers",
    "freeze_trainable_layers", "num_layers_unfrozen", "distribute_checkpointed_activations_layers",
)  # fmt: skip


def _lists(view: View, count: int | None) -> Iterator[Finding]:
    """Constants about layers that must follow the number of layers."""
    if not count:
        return
    for key in view.all(*COUNTS_OF_LAYERS):
        number = whole(key.value)
        if number and number > count:
            yield said(
                view,
                key,
                "K14",
                ERROR,
                f"{key.path[-1]} is {number}, but the model has {count} layers.",
                f"At most {count}.",
                put(view, key, count),
            )
        elif number and number == count and "offload" in str(key.path[-1]):
            yield said(
                view, key, "K14", ERROR, f"{key.path[-1]} {number} of {count} layers: at least one layer must stay.", f"At most {count - 1}.",
                put(view, key, count - 1),
            )  # fmt: skip
        elif number and "offload" in str(key.path[-1]) and number > count - 2 and number > 1:
            yield said(
                view, key, "K14", WARNING,
                f"{key.path[-1]} is the constant {number} and does not follow the {count} layers: a model with fewer layers is out of range.",
                "Write it as an expression of the number of layers.",
            )  # fmt: skip


def _divisors(n: int) -> list[int]:
    return [d for d in range(2, n + 1) if n % d == 0]


def heads(setup: Setup) -> Iterator[Finding]:
    hidden, count = setup.fact("model.hidden_size"), setup.fact("model.num_attention_heads")
    width, number = whole(hidden.value) if hidden else None, whole(count.value) if count else None
    size = whole(setup.value("model.head_dim"))
    tp, framework = degree(setup, "tp"), setup.value("strategy.framework")
    if hidden and width and number and not size and width % number:
        near = sorted((width // number * number, (width // number + 1) * number))
        yield about(
            hidden, "K15", ERROR, f"Hidden size {width} is no multiple of {number} attention heads: a head would have {width / number:g} channels.",
            f"Use hidden size {near[0]} or {near[1]}, or {few(_divisors_near(width, number))} heads.",
        )  # fmt: skip
    if count and number and number % tp:
        yield about(
            count,
            "K15",
            ERROR,
            f"tp {tp} does not divide {number} attention heads.",
            f"Use tp {few(d for d in (1, 2, 4, 8, 16) if number % d == 0)}.",
        )
    groups = setup.fact("model.num_key_value_heads")
    kv = whole(groups.value) if groups else None
    if groups and kv and number and number % kv:
        yield about(
            groups,
            "K15",
            ERROR,
            f"{kv} key-value heads do not divide {number} attention heads.",
            f"Use {few(d for d in (1, 2, 4, 8, 16) if number % d == 0)}.",
        )
    elif groups and kv and kv % tp and tp % kv:
        yield about(
            groups,
            "K15",
            ERROR,
            f"tp {tp} and {kv} key-value heads: neither divides the other.",
            f"Use tp {few(d for d in (1, 2, 4, 8, 16) if kv % d == 0)}.",
        )
    elif groups and kv and kv < tp and framework not in ("megatron", None):
        yield about(
            groups,
            "K15",
            WARNING,
            f"{kv} key-value heads over tp {tp}: every head is copied to {tp // kv} ranks.",
            f"Use tp {kv} or below.",
        )
    for name, word in (("model.intermediate_size", "MLP width"), ("model.hidden_size", "hidden size")):
        fact = setup.fact(name)
        value = whole(fact.value) if fact else None
        if fact and value and value % tp:
            yield about(
                fact,
                "K15",
                ERROR,
                f"tp {tp} does not divide the {word} {value}.",
                f"Use tp {few(d for d in (1, 2, 4, 8, 16) if value % d == 0)}.",
            )
    yield from _experts(setup)


def _experts(setup: Setup) -> Iterator[Finding]:
    fact, ep = setup.fact("model.num_experts"), degree(setup, "ep")
    count = whole(fact.value) if fact else None
    if fact and count and count % ep:
        yield about(fact, "K15", ERROR, f"ep {ep} does not divide {count} experts.", f"Use ep {few(_divisors(count))}.")
    top, routed = setup.fact("model.num_experts_per_tok"), whole(setup.value("model.num_experts_per_tok"))
    if top and count and routed and routed > count:
        yield about(top, "K15", ERROR, f"{routed} experts a token of {count} experts.", f"At most {count}.")


def _divisors_near(width: int, number: int) -> list[int]:
    found = sorted((d for d in range(1, min(width, 4096) + 1) if width % d == 0), key=lambda d: abs(d - number))
    return sorted(found[:3])


def pipeline(setup: Setup) -> Iterator[Finding]:
    """Micro-batches of a step against stages; the bubble in words."""
    fact, pp = setup.fact("strategy.pp"), degree(setup, "pp")
    if fact is None or pp < 2:
        return
    steps, where = _microbatches(setup)
    virtual = whole(setup.value("strategy.virtual_stages")) or 1
    if steps is None:
        return
    bubble = (pp - 1) / virtual / (steps + (pp - 1) / virtual)
    place = where.place if where else fact.place
    if steps < pp:
        needs = any(v.format in ("automodel", "torchtitan") for v in setup.views) or virtual > 1
        severity: Severity = ERROR if needs else WARNING
        yield Finding(
            "K24", severity, place, f"{steps} micro-batches on {pp} pipeline stages: stages stand idle {bubble:.0%} of the time"
            + ("; the schedule needs at least one a stage." if needs else "."),
            f"Give a step at least {pp} micro-batches ({4 * pp} keep the bubble near {(pp - 1) / (5 * pp - 1):.0%}): a smaller micro-batch, "
            f"more accumulation or a smaller pp.",
        )  # fmt: skip
    elif virtual > 1 and steps % pp:
        yield Finding(
            "K24", ERROR, place, f"{steps} micro-batches are no multiple of pp {pp}, which the interleaved schedule needs.",
            f"Use {steps // pp * pp} or {(steps // pp + 1) * pp} micro-batches.",
        )  # fmt: skip
    elif bubble > 0.25:
        yield Finding(
            "K24",
            NOTE,
            place,
            f"{steps} micro-batches on {pp} stages: the bubble is {bubble:.0%} of the step.",
            f"{4 * pp} micro-batches bring it to {(pp - 1) / (5 * pp - 1):.0%}.",
        )


def _microbatches(setup: Setup) -> tuple[int | None, Fact | None]:
    """Micro-batches that go through the pipeline in one piece, and the fact that decides them."""
    local = whole(setup.value("strategy.micro_batch_size"))
    each = next((n for v in setup.seen("automodel") if (n := whole(v.value("pp_microbatch_size", "pp_batch_size")))), None)
    if each and local:
        return max(1, local // each), setup.fact("strategy.micro_batch_size")
    said_steps = whole(setup.value("training.accumulation"))
    if said_steps:
        return said_steps, setup.fact("training.accumulation")
    total, ranks = as_number(setup.value("training.global_batch_size")), data_ranks(setup)
    if total and ranks:
        return int(total // ((local or 1) * ranks)) or None, setup.fact("training.global_batch_size")
    return None, None


def _megatron(name: str, *flags: str) -> Example:
    base = "--micro-batch-size 1 --seq-length 2048 --max-position-embeddings 2048 --lr 1e-4 --train-iters 1000 --bf16"
    return Example(
        {
            name: "#!/bin/bash\ntorchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py \\\n  "
            + " \\\n  ".join([*flags, *base.split(" --")[:1], *("--" + b for b in base.split(" --")[1:])])
            + "\n"
        }
    )


CHECK = (
    Check(
        "K03", "the number of processes is a multiple of tp x pp x cp and of ep x etp x pp", worlds,
        _megatron("train.sh", "--num-layers 24", "--hidden-size 1024", "--num-attention-heads 16", "--global-batch-size 64",
            "--tensor-model-parallel-size 3", "--pipeline-model-parallel-size 2"),
        "error where it does not divide; 'cannot run as written' where one node stands for many",
        "a stage count that divides nothing but the world size",
    ),
    Check(
        "K14", "layers over pipeline stages; counts of layers within the model", layers,
        _megatron("train.sh", "--num-layers 30", "--hidden-size 1024", "--num-attention-heads 16", "--global-batch-size 64",
            "--pipeline-model-parallel-size 4"),
        "error where Megatron stops or a count exceeds the layers; note where stages are uneven",
        "embedding and loss counted as layers, a shorter first or last stage, a layout string",
    ),
    Check(
        "K15", "heads, key-value heads, widths and experts divide", heads,
        _megatron("train.sh", "--num-layers 24", "--hidden-size 1000", "--num-attention-heads 16", "--global-batch-size 64"),
        "error where a part would not be whole; warning where key-value heads are copied",
        "a head size that is given apart from hidden size",
    ),
    Check(
        "K24", "micro-batches fill the pipeline", pipeline,
        _megatron("train.sh", "--num-layers 24", "--hidden-size 1024", "--num-attention-heads 16", "--global-batch-size 2", "--pipeline-model-parallel-size 4"),
        "error where the schedule refuses; warning below one a stage; note above a bubble of 25 %",
    ),
)  # fmt: skip
