"""``trainwright schedule``: a pipeline schedule replayed, shown, drawn, compared, searched for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..schedules.compare import Sized
    from ..schedules.timeline import Timeline

SUFFIXES = (".html", ".svg", ".trace.json", ".json", ".csv")
Share = "a number, or one a rank: 1,1,1,1.5"


Name = Annotated[
    str,
    typer.Argument(
        help="A schedule's name, a PyTorch schedule file (x.csv, - for stdin), automatic, optimal; none lists them.", show_default=False
    ),
]
Stages = Annotated[int, typer.Option("--stages", "--pp", help="Pipeline ranks.")]
Microbatches = Annotated[int, typer.Option("--microbatches", help="Microbatches of a step.")]
Virtual = Annotated[
    int | None,
    typer.Option("--virtual", "--virtual-stages", help="Chunks on each rank (left out: the schedule's least).", show_default=False),
]
Forward = Annotated[str, typer.Option(help=f"Time of a rank's forward of one microbatch: {Share}.")]
Backward = Annotated[str, typer.Option(help="Time of its input gradient.")]
Weight = Annotated[
    str, typer.Option(help="Time of its weight gradient, which a schedule that does not split runs with the input gradient.")
]
Group = Annotated[
    int | None, typer.Option(help="interleaved-1f1b: microbatches that run a chunk before the next (the stages).", show_default=False)
]
Latency = Annotated[float, typer.Option(help="One-way latency of a message.")]
MessageBytes = Annotated[float, typer.Option(help="Size of a message, which takes size / bandwidth longer.")]
Bandwidth = Annotated[float, typer.Option(help="Bytes that a link moves in a unit of time.")]
Blocking = Annotated[bool, typer.Option("--blocking", help="Sending keeps the sender busy.")]
Recompute = Annotated[str, typer.Option(help="Time of recomputation before each backward.")]
Overlap = Annotated[float, typer.Option(help="Time of an overlapped forward and backward over the sum of both.")]
Gather = Annotated[str, typer.Option(help="Time to gather a rank's parameters (FSDP).")]
Reduce = Annotated[str, typer.Option(help="Time to reduce a rank's gradients (data parallel).")]
Regather = Annotated[bool, typer.Option("--regather", help="Parameters are given back and gathered for each use.")]
Slowdown = Annotated[str, typer.Option(help="Factor on each rank's compute, such as 1,1,1.2,1 for a straggler.", show_default=False)]
Memory = Annotated[
    float | None, typer.Option(help="Cap for automatic and optimal, in microbatches' activations of a rank.", show_default=False)
]
Versus = Annotated[str, typer.Option(help="A second schedule, shown beside the first at equal memory.", show_default=False)]
AsIs = Annotated[bool, typer.Option("--as-is", help="With --versus: both at their own memory.")]
TradeOff = Annotated[bool, typer.Option("--trade-off", help="The best schedule for each memory cap.")]
Output = Annotated[
    str | None,
    typer.Option(
        "-o", "--output", help="Where to draw: x.html, x.svg, x.json, x.trace.json (Perfetto), x.csv (PyTorch).", show_default=False
    ),
]
Width = Annotated[
    int | None,
    typer.Option(min=300, max=100_000, help="Pixels across the drawing (left out: enough for numbers, up to 2600).", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]


def schedule(
    name: Name = "",
    stages: Stages = 4,
    microbatches: Microbatches = 8,
    virtual: Virtual = None,
    forward: Forward = "1",
    backward: Backward = "2",
    weight: Weight = "0",
    group: Group = None,
    p2p: Latency = 0.0,
    message_bytes: MessageBytes = 0.0,
    bandwidth: Bandwidth = float("inf"),
    blocking: Blocking = False,
    recompute: Recompute = "0",
    overlap: Overlap = 1.0,
    gather: Gather = "0",
    reduce: Reduce = "0",
    regather: Regather = False,
    slowdown: Slowdown = "",
    memory: Memory = None,
    versus: Versus = "",
    as_is: AsIs = False,
    trade_off: TradeOff = False,
    output: Output = None,
    width: Width = None,
    json_: Json = False,
) -> None:
    """Replay a pipeline schedule: makespan, the three bubbles, memory by rank, why ranks stand idle.

    Example: trainwright schedule interleaved-1f1b --stages 4 --microbatches 8 --virtual 2 --versus zb-v -o timeline.html
    """
    from .output import print_json

    if not name and not trade_off:
        return _list(json_)
    times = {"forward": forward, "recompute": recompute, "gather": gather, "reduce": reduce, "backward": backward, "weight": weight}
    costs: dict[str, Any] = {k: _numbers(v, f"--{k}") for k, v in times.items()}
    costs |= {"p2p": p2p, "blocking": blocking, "overlap": overlap, "regather": regather}
    costs |= {"message_bytes": message_bytes, "bandwidth_bytes_per_s": bandwidth} | ({} if group is None else {"group": group})
    if slowdown:
        factors = _numbers(slowdown, "--slowdown")
        costs["slowdown"] = factors if isinstance(factors, list) else [factors]
    if trade_off:
        return _trade_off(stages, microbatches, costs, json_)
    _drawable(output, bool(versus))
    shown, note = _replayed(name, versus, as_is, (stages, microbatches, virtual, costs, memory))
    _write(output, shown, note, width)
    if json_:
        print_json(_document(shown, note))
    else:
        _show(shown, note)
    return None


Asked = tuple[int, int, int | None, dict[str, Any], float | None]


def _replayed(name: str, versus: str, as_is: bool, asked: Asked) -> tuple[list[Timeline], str]:
    """The schedule, or both of two at equal memory unless `as_is`, and a sentence where they need one."""
    from ..schedules.compare import at_equal_memory

    first, source = _sized(name, *asked)
    if not versus:
        return [first.replay()], source
    second, other = _sized(versus, *asked, second=True)
    a, b, note = (first.replay(), second.replay(), "") if as_is else at_equal_memory(first, second)
    return [a, b], " ".join(dict.fromkeys(x for x in (source, other, note) if x))


def _numbers(text: str, where: str) -> float | list[float]:
    """``1`` or ``1,1,1.5``."""
    from ..errors import SpecError

    try:
        found = [float(x) for x in text.split(",")]
    except ValueError:
        raise SpecError(f"{text[:60]!r} is not {Share}", where) from None
    return found if len(found) > 1 else found[0]


def _sized(
    name: str, stages: int, microbatches: int, virtual: int | None, costs: dict[str, Any], memory: float | None, second: bool = False
) -> tuple[Sized, str]:
    """What a name on the command line stands for, and a sentence where it needs one. The second of two takes `virtual` only where its chunks are free."""
    from ..errors import SpecError
    from ..schedules import SCHEDULES
    from ..schedules.compare import Sized
    from ..schedules.torch_csv import read_csv

    if name == "-" or name.lower().endswith(".csv"):
        from .output import read_text

        table = read_csv(read_text(name, 64_000_000) + "\n", "stdin" if name == "-" else name)
        place = table.placement
        return Sized(table, place.ranks, place.microbatches, place.chunks, costs), ""
    plain = name.lower().replace("_", "-")
    if plain in ("automatic", "auto", "optimal"):
        used = {k: costs[k] for k in ("forward", "backward", "weight", "p2p")}
        ignored = [k for k in ("group", "recompute", "gather", "reduce", "slowdown", "blocking", "message_bytes") if _matters(costs.get(k))]
        if ignored:
            raise SpecError(
                f"{plain} schedules are made for forward, backward, weight and p2p alone", f"--{ignored[0]}", "a named schedule"
            )
        if plain == "optimal":
            from ..schedules.optimal import optimal

            best = optimal(stages, microbatches, virtual or 1, **used, cap=memory)
            note = f"Proven optimal in {best.seconds:.2g} s." if best.proven else f"Not proven: no order is shorter than {best.bound:.6g}."
            return Sized(
                best.timeline.table, stages, microbatches, virtual or 1, used
            ), f"{note} The search began with {best.start} at {best.start_objective:.6g}."
        from ..schedules.automatic import automatic

        choice = automatic(stages, microbatches, float("inf") if memory is None else memory, **used)
        t = choice.timeline
        return Sized(t.table, stages, microbatches, t.virtual_stages, used), f"The best schedule for these costs is {choice.name}."
    entry = SCHEDULES.get_or_raise(name, "schedule")
    chosen = entry.default_chunks if entry.chunks != "many" and (second or virtual == 1) else virtual
    idle = entry.splits_backward and not _matters(costs["weight"])
    note = (
        f"Weight gradients cost nothing here: --backward 1 --weight 1 shows what {entry.name} gains by splitting them off." if idle else ""
    )
    own = {k: x for k, x in costs.items() if k != "group" or not second or entry.name == "interleaved-1f1b"}
    return Sized(entry.name, stages, microbatches, chosen, own), note


def _matters(value: Any) -> bool:
    return bool(any(value)) if isinstance(value, list) else bool(value)


def _list(json_: bool) -> None:
    from ..schedules import SCHEDULES
    from .output import print_rows

    chunks = {"one": "1", "two": "2", "many": "2 or more"}
    rows = [
        {"schedule": n, "chunks a rank": chunks[e.chunks], "weight copies": e.weight_copies, "what": e.doc, "source": e.source}
        for n, e in sorted(SCHEDULES.items())
    ]
    print_rows(rows if json_ else [{k: v for k, v in r.items() if k != "source"} for r in rows], "json" if json_ else "table")


def _trade_off(stages: int, microbatches: int, costs: dict[str, Any], json_: bool) -> None:
    from ..schedules.automatic import trade_off
    from .output import print_rows

    front = trade_off(stages, microbatches, **{k: costs[k] for k in ("forward", "backward", "weight", "p2p")})
    rows = [
        {
            "memory cap": cap,
            "schedule": c.name,
            "makespan": c.timeline.makespan,
            "bubble idle/total": round(c.timeline.bubble_total, 6),
            "peak": c.peak,
        }
        for cap, c in front
    ]
    print_rows(
        rows, "json" if json_ else "table", "" if json_ else "The shortest step for each memory cap, in microbatches' activations of a rank"
    )


def _document(shown: list[Timeline], note: str) -> dict[str, Any]:
    from ..schedules.bounds import bound_of

    found = [t.to_dict() | {"lower_bound": bound_of(t).makespan} for t in shown]
    return found[0] | ({"note": note} if note else {}) if len(found) == 1 else {"schedules": found, "note": note}


def _show(shown: list[Timeline], note: str) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ..report.timeline import title_of
    from ..report.timeline_html import figures
    from ..report.timeline_text import to_text
    from .output import console

    screen = console()
    longest = max(t.makespan for t in shown)
    for t in shown:
        screen.print(title_of(t), style="bold", markup=False)
        screen.print(to_text(t, screen.width, longest if len(shown) > 1 else 0.0))
        screen.print()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=len(shown) > 1)
    table.add_column("")
    for t in shown:
        table.add_column(Text(t.name), justify="right", overflow="fold")
    table.add_column("", style="dim")
    for line in zip(*(figures(t) for t in shown)):
        table.add_row(line[0][0], *(value for _, value, _ in line), line[0][2] if len(shown) == 1 else "")
    screen.print(table)
    if note:
        screen.print(note, markup=False)


def _suffix(output: str) -> str:
    lower = output.lower()
    return next((s for s in SUFFIXES if lower.endswith(s)), "")


def _drawable(output: str | None, two: bool) -> None:
    """Refuses before anything is searched or replayed what could not be drawn or written."""
    from ..errors import SpecError
    from .output import check_target

    if output and not _suffix(output):
        raise SpecError(f"{output[:80]!r} does not say what to draw", "--output", [f"timeline{s}" for s in SUFFIXES])
    if output and two and _suffix(output) in (".trace.json", ".csv"):
        raise SpecError("holds one schedule; leave out --versus", output)
    check_target(output, f"timeline{_suffix(output or '')}")


def _write(output: str | None, shown: list[Timeline], note: str, width: int | None) -> None:
    """Draws what the file's name asks for."""
    if not output:
        return
    import json

    from ..report.perfetto import to_trace
    from ..report.timeline import to_svg
    from ..report.timeline_html import to_html
    from ..schedules.torch_csv import write_csv
    from .output import console, wrote

    text = {
        ".html": lambda: to_html(shown, note=note, width=width),
        ".svg": lambda: to_svg(shown, width=width),
        ".json": lambda: json.dumps([t.to_dict(actions=True) for t in shown] if len(shown) > 1 else shown[0].to_dict(actions=True)) + "\n",
        ".trace.json": lambda: to_trace(shown[0]),
        ".csv": lambda: write_csv(shown[0].table),
    }[_suffix(output)]()
    console(stderr=True).print(wrote(output, text))


def register(app: typer.Typer) -> None:
    app.command()(schedule)
