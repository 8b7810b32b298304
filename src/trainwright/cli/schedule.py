"""``trainwright schedule``: a pipeline schedule replayed, shown, drawn, compared, searched for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..schedules.compare import Sized
    from ..schedules.timeline import Timeline

SUFFIXES = (".html", ".svg", ".trace.json", ".json", ".csv")
Share = "a number, or one a rank: 1,1,1,1.5"


def schedule(
    name: Annotated[
        str,
        typer.Argument(
            help="A schedule's name, a PyTorch schedule file (x.csv, - for stdin), automatic, optimal; none lists them.", show_default=False
        ),
    ] = "",
    stages: Annotated[int, typer.Option("--stages", "--pp", help="Pipeline ranks.")] = 4,
    microbatches: Annotated[int, typer.Option("--microbatches", help="Microbatches of a step.")] = 8,
    virtual: Annotated[
        int | None,
        typer.Option("--virtual", "--virtual-stages", help="Chunks on each rank (left out: the schedule's least).", show_default=False),
    ] = None,
    forward: Annotated[str, typer.Option(help=f"Time of a rank's forward of one microbatch: {Share}.")] = "1",
    backward: Annotated[str, typer.Option(help="Time of its input gradient.")] = "2",
    weight: Annotated[
        str, typer.Option(help="Time of its weight gradient, which a schedule that does not split runs with the input gradient.")
    ] = "0",
    group: Annotated[
        int | None, typer.Option(help="interleaved-1f1b: microbatches that run a chunk before the next (the stages).", show_default=False)
    ] = None,
    p2p: Annotated[float, typer.Option(help="One-way latency of a message.")] = 0.0,
    message_bytes: Annotated[float, typer.Option(help="Size of a message, which takes size / bandwidth longer.")] = 0.0,
    bandwidth: Annotated[float, typer.Option(help="Bytes that a link moves in a unit of time.")] = float("inf"),
    blocking: Annotated[bool, typer.Option("--blocking", help="Sending keeps the sender busy.")] = False,
    recompute: Annotated[str, typer.Option(help="Time of recomputation before each backward.")] = "0",
    overlap: Annotated[float, typer.Option(help="Time of an overlapped forward and backward over the sum of both.")] = 1.0,
    gather: Annotated[str, typer.Option(help="Time to gather a rank's parameters (FSDP).")] = "0",
    reduce: Annotated[str, typer.Option(help="Time to reduce a rank's gradients (data parallel).")] = "0",
    regather: Annotated[bool, typer.Option("--regather", help="Parameters are given back and gathered for each use.")] = False,
    slowdown: Annotated[
        str, typer.Option(help="Factor on each rank's compute, such as 1,1,1.2,1 for a straggler.", show_default=False)
    ] = "",
    memory: Annotated[
        float | None, typer.Option(help="Cap for automatic and optimal, in microbatches' activations of a rank.", show_default=False)
    ] = None,
    versus: Annotated[str, typer.Option(help="A second schedule, shown beside the first at equal memory.", show_default=False)] = "",
    as_is: Annotated[bool, typer.Option("--as-is", help="With --versus: both at their own memory.")] = False,
    trade_off: Annotated[bool, typer.Option("--trade-off", help="The best schedule for each memory cap.")] = False,
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", help="Where to draw: x.html, x.svg, x.json, x.trace.json (Perfetto), x.csv (PyTorch).", show_default=False
        ),
    ] = "",
    width: Annotated[
        int | None,
        typer.Option(
            min=300, max=100_000, help="Pixels across the drawing (left out: enough for numbers, up to 2600).", show_default=False
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Replay a pipeline schedule: makespan, the three bubbles, memory by rank, why ranks stand idle.

    Example: trainwright schedule interleaved-1f1b --stages 4 --microbatches 8 --virtual 2 --versus zb-v -o timeline.html
    """
    from ..schedules.compare import at_equal_memory
    from .output import print_json

    if not name and not trade_off:
        return _list(json_)
    shares = {"forward": forward, "recompute": recompute, "gather": gather, "reduce": reduce}
    costs: dict[str, Any] = {k: _numbers(v, f"--{k}") for k, v in shares.items()}
    costs |= {"p2p": p2p, "blocking": blocking, "overlap": overlap, "regather": regather}
    costs |= {"message_bytes": message_bytes, "bandwidth_bytes_per_s": bandwidth}
    if group is not None:
        costs["group"] = group
    if slowdown:
        factors = _numbers(slowdown, "--slowdown")
        costs["slowdown"] = factors if isinstance(factors, list) else [factors]
    costs |= {"backward": _numbers(backward, "--backward"), "weight": _numbers(weight, "--weight")}
    if trade_off:
        return _trade_off(stages, microbatches, costs, json_)
    first, source = _sized(name, stages, microbatches, virtual, costs, memory)
    if not versus:
        shown, note = [first.replay()], source
    else:
        second, other = _sized(versus, stages, microbatches, virtual, costs, memory, second=True)
        a, b, note = (first.replay(), second.replay(), "") if as_is else at_equal_memory(first, second)
        shown, note = [a, b], " ".join(dict.fromkeys(x for x in (source, other, note) if x))
    _write(output, shown, note, width)
    if json_:
        print_json(_document(shown, note))
    else:
        _show(shown, note)
    return None


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


def _write(output: str, shown: list[Timeline], note: str, width: int | None) -> None:
    """Draws what the file's name asks for."""
    if not output:
        return
    import json

    from ..errors import SpecError
    from ..report.perfetto import to_trace
    from ..report.timeline import to_svg
    from ..report.timeline_html import to_html
    from ..schedules.torch_csv import write_csv
    from .output import console, write_text

    lower = output.lower()
    suffix = next((s for s in SUFFIXES if lower.endswith(s)), "")
    if not suffix:
        raise SpecError(f"{output[:80]!r} does not say what to draw", "--output", [f"timeline{s}" for s in SUFFIXES])
    if suffix in (".trace.json", ".csv") and len(shown) > 1:
        raise SpecError("holds one schedule; leave out --versus", output)
    text = {
        ".html": lambda: to_html(shown, note=note, width=width),
        ".svg": lambda: to_svg(shown, width=width),
        ".json": lambda: json.dumps([t.to_dict(actions=True) for t in shown] if len(shown) > 1 else shown[0].to_dict(actions=True)) + "\n",
        ".trace.json": lambda: to_trace(shown[0]),
        ".csv": lambda: write_csv(shown[0].table),
    }[suffix]()
    console(stderr=True).print(f"wrote {write_text(output, text)}")


def register(app: typer.Typer) -> None:
    app.command()(schedule)
