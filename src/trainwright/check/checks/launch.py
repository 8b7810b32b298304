"""K12, K22, K38: counts of GPUs and nodes that agree, machines that find each other, and time limits that are long enough."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..findings import Check, Example, Finding
from ..setup import Fact, Place, Setup
from ..view import View, as_number, truthy, whole
from ._tools import BLOCKED, ERROR, NOTE, WARNING, about, put, said

LOCAL = ("localhost", "127.0.0.1", "0.0.0.0", "::1")


def counts(setup: Setup) -> Iterator[Finding]:
    for name, word in (("launch.gpus_per_node", "GPUs a node"), ("launch.nodes", "nodes"), ("launch.world_size", "processes")):
        facts = [f for f in setup.facts(name) if whole(f.value)]
        for other in _others(facts):
            lower = other.rank < facts[0].rank and other.place.file != facts[0].place.file
            yield about(
                other, "K12", NOTE if lower else WARNING if _default(other) else ERROR,
                f"{word}: {whole(other.value)} here, {whole(facts[0].value)} at "
                f"{facts[0].place}" + (", which wins." if lower else "."), f"Say {whole(facts[0].value)} in both.",
            )  # fmt: skip
    yield from _whole_world(setup)
    for view in setup.seen():
        if view.document.syntax == "shell" and view.document.parent is None:
            yield from _script(view)


def _others(facts: list[Fact]) -> Iterator[Fact]:
    """Facts of other files than the winner's; a script's own branches and defaults are no contradiction."""
    seen = {whole(facts[0].value)} if facts else set()
    for fact in facts[1:]:
        if whole(fact.value) not in seen and fact.place.file != facts[0].place.file:
            seen.add(whole(fact.value))
            yield fact


def _default(fact: Fact) -> bool:
    """A count of one is what templates hold."""
    return whole(fact.value) == 1


def _whole_world(setup: Setup) -> Iterator[Finding]:
    total, nodes, per = setup.fact("launch.world_size"), whole(setup.value("launch.nodes")), whole(setup.value("launch.gpus_per_node"))
    count = whole(total.value) if total else None
    if total and count and nodes and per and count != nodes * per:
        yield about(
            total, "K12", ERROR, f"{count} processes are started for {nodes} nodes of {per} GPUs = {nodes * per}.", f"Say {nodes * per}."
        )
    elif total and count and nodes and count % nodes:
        yield about(
            total,
            "K12",
            ERROR,
            f"{count} processes do not divide over {nodes} machines.",
            f"Use {count // nodes * nodes or nodes} or {(count // nodes + 1) * nodes}.",
        )


def _script(view: View) -> Iterator[Finding]:
    text = view.document.text
    lines = text.splitlines()
    # One task a GPU under srun, and a launcher that starts one process a GPU in each of them.
    tasks = next(
        ((i, int(m.group(1))) for i, line in enumerate(lines, 1) if (m := re.match(r"#SBATCH\s+--ntasks-per-node[= ](\d+)", line))), None
    )
    gpus = next(
        (int(m.group(1)) for line in lines if (m := re.match(r"#SBATCH\s+--(?:gres=gpu(?::\w+)?:|gpus-per-node[= ](?:\w+:)?)(\d+)", line))),
        None,
    )
    if tasks and tasks[1] > 1:
        for number, line in enumerate(lines, 1):
            hit = re.search(r"--(?:nproc[_-]per[_-]node|num[_-]gpus)[= ]+(\d+|\$\{?\w+\}?)", line)
            if hit and hit.group(1) != "1" and not line.lstrip().startswith("#"):
                yield Finding(
                    "K12", ERROR, Place(view.document.name, number), f"Slurm starts {tasks[1]} tasks a node (line {tasks[0]}) and each "
                    f"starts {hit.group(1)} processes: more processes than GPUs.",
                    "One task a node with a launcher, or one task a GPU without.",
                )  # fmt: skip
                break
    visible = next(
        (
            (i, m.group(1))
            for i, line in enumerate(lines, 1)
            if (m := re.search(r"CUDA_VISIBLE_DEVICES=[\"']?([\d,]+)", line)) and not line.lstrip().startswith("#")
        ),
        None,
    )
    per = next(
        (
            (i, int(m.group(1)))
            for i, line in enumerate(lines, 1)
            if (m := re.search(r"--nproc[_-]per[_-]node[= ]+(\d+)", line)) and not line.lstrip().startswith("#")
        ),
        None,
    )
    if visible and per and len([d for d in visible[1].split(",") if d]) != per[1] and per[0] >= visible[0]:
        yield Finding(
            "K12", ERROR, Place(view.document.name, per[0]), f"{per[1]} processes, but CUDA_VISIBLE_DEVICES (line {visible[0]}) shows "
            f"{len(visible[1].split(','))} GPUs.", "Make them equal.",
        )  # fmt: skip
    yield from _header(view, lines, gpus)
    yield from _unlimited(view, lines)


def _header(view: View, lines: list[str], gpus: int | None) -> Iterator[Finding]:
    """The Slurm header against the variable that counts GPUs."""
    if not gpus:
        return
    for number, line in enumerate(lines, 1):
        hit = re.match(
            r"(?:export\s+|readonly\s+)?((?:N?GPUS?|NUM_GPUS?|N_GPUS?|NPROC)(?:_PER_NODE)?|GPUS_PER_NODE|NPROC_PER_NODE)=[\"']?(\d+)",
            line.strip(),
        )
        if hit and "PER_NODE" in hit.group(1) and int(hit.group(2)) != gpus:
            yield Finding(
                "K12",
                ERROR,
                Place(view.document.name, number),
                f"{hit.group(1)} is {hit.group(2)}, but Slurm gives {gpus} GPUs a node.",
                f"Set it to {gpus}, or ask Slurm for {hit.group(2)}.",
            )
            return


def _unlimited(view: View, lines: list[str]) -> Iterator[Finding]:
    """`deepspeed` without a count takes every GPU of the machine."""
    single = re.search(r"single[_-]?gpu|1[_-]?gpu\b|one[_-]?gpu", view.document.name + "\n" + "\n".join(lines[:8]), re.IGNORECASE)
    for number, line in enumerate(lines, 1):
        start = re.match(r"\s*(?:nohup\s+|time\s+)?deepspeed\s+(.*)", line)
        if start is None or "$" in line.split("deepspeed", 1)[0]:
            continue
        if re.search(r"--(num_gpus|num_nodes|include|exclude|hostfile|H)\b", line) or any(
            "CUDA_VISIBLE_DEVICES=" in x and not x.lstrip().startswith("#") for x in lines
        ):
            continue
        one = bool(single) or bool(re.search(r"single", view.document.name, re.IGNORECASE))
        yield Finding(
            "K12", WARNING if one else NOTE, Place(view.document.name, number), "deepspeed without --num_gpus starts a process on every GPU "
            "of the machine, so the global batch grows with it.",
            "Add --num_gpus 1 (or the number that is meant).",
        )  # fmt: skip
        return


def machines(setup: Setup) -> Iterator[Finding]:
    nodes = whole(setup.value("launch.nodes"))
    for view in setup.seen("accelerate"):
        key, address = view.get("num_machines"), view.get("main_process_ip")
        count = whole(key.value) if key else None
        launched = setup.fact("launch.main_address")
        if key and count and count > 1 and (address is None or address.value in (None, "", "null")) and launched is None:
            yield said(
                view, key, "K38", NOTE, f"{count} machines and no main_process_ip here: the launch line must give it, and --machine_rank, on every one.",
                "--main_process_ip HEAD --main_process_port 29500 --machine_rank $SLURM_NODEID",
            )  # fmt: skip
        elif key and count and count > 1 and address is not None and str(address.value) in LOCAL:
            yield said(
                view, address, "K38", ERROR, f"{count} machines meet at {address.value}, which is each of them.", "The head node's address."
            )
    for view in setup.seen():
        if view.format == "accelerate" or view.document.syntax != "shell":
            continue
        host = view.get("master_addr", "rdzv_endpoint")
        if nodes and nodes > 1 and host is not None and str(host.value).split(":")[0] in LOCAL:
            yield said(view, host, "K38", ERROR, f"{nodes} nodes meet at {host.value}, which is each of them.", "The head node's address.")
        if view.document.parent is None:
            yield from _multi(view)


def _multi(view: View) -> Iterator[Finding]:
    """A launch over several nodes without rank, address or port, or with all of them left to the caller."""
    text = re.sub(r"\\\n", " ", view.document.text)
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        hit = re.search(r"(?:torchrun|torch\.distributed\.(?:run|launch))\b(.*)", line)
        if hit is None:
            continue
        rest = hit.group(1)
        nodes = re.search(r"--nnodes[= ]+[\"']?(\S+)", rest)
        if nodes is None or nodes.group(1).strip("\"'") == "1" or "standalone" in rest or "$" in rest.split("--")[0]:
            continue
        names = set(re.findall(r"\$\{?([A-Za-z_]\w*)", rest))
        inherited = {n for n in names if re.search(rf"(?m)(^|[\s;]){n}=", view.document.text) is None and not n.startswith("SLURM")}
        needed = {
            "rank": r"--node[_-]rank|--rdzv",
            "address": r"--master[_-]addr|--rdzv[_-]endpoint",
            "port": r"--master[_-]port|--rdzv[_-]endpoint",
        }
        missing = [what for what, flags in needed.items() if not re.search(flags, rest)]
        number = next(
            (
                i
                for i, raw in enumerate(view.document.text.splitlines(), 1)
                if re.search(r"torchrun|torch\.distributed\.", raw) and not raw.lstrip().startswith("#")
            ),
            1,
        )
        place = Place(view.document.name, number)
        literal = re.fullmatch(r"\d+", nodes.group(1).strip("\"'"))
        if missing and literal and int(nodes.group(1).strip("\"'")) > 1:
            yield Finding(
                "K38",
                ERROR,
                place,
                f"{nodes.group(1)} nodes without {', '.join(missing)}: every node starts a group of its own.",
                "Add " + ", ".join(missing) + ".",
            )
        elif {"node count", "rank"} <= {
            ("node count" if re.search(r"NODES?$|NNODES|WORLD", n) else "rank" if "RANK" in n else "") for n in inherited
        } and len(inherited) >= 4:
            yield Finding(
                "K38", BLOCKED, place, f"Nothing here sets {', '.join(sorted(inherited))}: without a caller that exports them the launcher "
                f"reads empty arguments.",
                "Set them in this script, or take them from the scheduler.",
            )  # fmt: skip
        return


def timeouts(setup: Setup) -> Iterator[Finding]:
    fact = setup.fact("launch.timeout_s")
    seconds = as_number(fact.value) if fact else None
    heavy = _heavy(setup)
    if fact and seconds is not None and 0 < seconds < 60:
        yield about(
            fact,
            "K22",
            ERROR,
            f"A time limit of {seconds:g} s for a collective: loading, saving and the first step take longer.",
            "30 minutes.",
        )
    elif fact and seconds is not None and seconds <= 600 and heavy:
        yield about(
            fact,
            "K22",
            WARNING,
            f"A time limit of {seconds / 60:g} min for collectives, while {heavy}: the slowest rank is waited for no longer than that.",
            "30 minutes or more.",
        )
    for view in setup.seen():
        key = view.get("val_check_interval", "limit_val_batches")
        if (
            key is not None
            and view.format == "nemo"
            and as_number(view.value("limit_val_batches")) == 1.0
            and isinstance(view.value("limit_val_batches"), float)
            and as_number(view.value("val_check_interval")) not in (None, 1.0)
        ):
            yield said(
                view,
                view.get("limit_val_batches"),
                "K22",
                NOTE,
                "limit_val_batches 1.0 is the whole validation set at every check.",
                "A whole number of batches.",
                put(view, view.get("limit_val_batches"), 32),
            )
        hidden = view.get("NCCL_TIMEOUT")
        if hidden is not None:
            yield said(
                view,
                hidden,
                "K22",
                WARNING,
                "NCCL_TIMEOUT is read by nothing; the limit is init_process_group's timeout.",
                "ddp_timeout, or --distributed-timeout-minutes.",
            )


def _heavy(setup: Setup) -> str:
    """What makes the first step, or a save, longer than ten minutes."""
    from .names import SIZE

    name = str(setup.value("model.name") or "")
    size = max((float(n) for n in SIZE.findall(name)), default=0.0)
    pp, ep = (whole(setup.value(f"strategy.{axis}")) or 1 for axis in ("pp", "ep"))
    if size >= 100 and (pp > 1 or ep > 1):
        return f"a model of {size:g}B sets up its exchanges of {'stages' if pp > 1 else 'experts'} in the first step"
    if size >= 400:
        return f"a model of {size:g}B loads and builds its groups first"
    saves = any(truthy(k.value) for v in setup.seen() for k in v.all("save_consolidated", "stage3_gather_16bit_weights_on_model_save"))
    if size >= 65 and saves:
        return f"rank 0 gathers and writes a model of {size:g}B"
    return ""


_ACCELERATE = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmachine_rank: 0\nmain_process_ip: {}\n"
    "main_training_function: main\nmixed_precision: bf16\nnum_machines: {}\nnum_processes: {}\n"
)
CHECK = (
    Check(
        "K12", "counts of GPUs and nodes agree", counts, Example({"acc.yaml": _ACCELERATE.format("10.0.0.1", 2, 15)}),
        "error where two places differ or tasks x processes exceed the GPUs; note where the launch line overrides", "a count in a file that "
        "the launch line overrides",
    ),
    Check(
        "K22", "time limits of collectives", timeouts,
        Example({"sft.yaml": "recipe: TrainFinetuneRecipeForNextTokenPrediction\nstep_scheduler:\n  global_batch_size: 512\n  "
            "local_batch_size: 8\ndist_env:\n  backend: nccl\n  timeout_minutes: 10\nmodel:\n"
                 "  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained\n  pretrained_model_name_or_path: "
                 "Qwen/Qwen3-235B-A22B\ndistributed:\n  strategy: fsdp2\n  tp_size: 1\n  cp_size: 1\n  pp_size: 4\n"
                 "  ep_size: 32\n"}),
        "error below a minute; warning where a first step or a save takes longer",
    ),
    Check(
        "K38", "several nodes find each other", machines, Example({"acc.yaml": _ACCELERATE.format("localhost", 2, 16)}),
        "error where they meet at localhost or lack a rank; 'cannot run as written' where all is left to the caller; note where the launch line must add it",
        "several machines without an address where the launch line gives it",
    ),
)  # fmt: skip
