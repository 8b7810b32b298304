"""The picture of memory through a step: no peak is lost, and what is drawn is what is there."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import trainwright as tw
from trainwright.cost.memory_table import PHASES, Moment
from trainwright.report.memory_timeline import HEIGHT, condensed, draw

GIB = 2**30
STEP = [
    Moment("weights", "load", {"parameters": 4 * GIB}),
    Moment("layer 1", "forward", {"parameters": 4 * GIB, "activations": 4 * GIB}),
    Moment("layer 0", "backward", {"parameters": 4 * GIB, "activations": 4 * GIB, "gradients": 4 * GIB}),
    Moment("step", "optimizer", {"parameters": 4 * GIB, "gradients": 4 * GIB}),
]


def drawn(moments: list[Moment], width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    draw(console, moments)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_columns_are_as_high_as_the_bytes_and_parts_stand_in_their_order() -> None:
    lines = drawn(STEP)
    assert lines[0].startswith("  12.0 GiB ")
    axis = lines[HEIGHT]
    at = {name: axis.index(name) for name in PHASES}
    column = {name: "".join(line.ljust(100)[i] for line in lines[:HEIGHT]).strip() for name, i in at.items()}
    assert column == {"load": "████", "forward": "▚▚▚▚████", "backward": "▚▚▚▚▒▒▒▒████", "optimizer": "▒▒▒▒████"}
    assert lines[HEIGHT + 1].strip() in ("^ layer 0", "layer 0 ^")
    assert lines[HEIGHT + 2] == "█ parameters  ▒ gradients  ▚ activations"


@pytest.mark.parametrize("width", [20, 40, 80, 300])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, drawn(STEP, width))) <= width


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 2**40)), min_size=1, max_size=300), st.integers(1, 200))
def test_what_is_left_of_many_moments_has_every_phase_s_peak_in_order(given_: list[tuple[str, int]], columns: int) -> None:
    moments = [
        Moment(str(i), phase, {"activations": size}) for i, (phase, size) in enumerate(sorted(given_, key=lambda g: PHASES.index(g[0])))
    ]
    few = condensed(moments, columns)
    for phase in PHASES:
        assert max((m.bytes for m in few if m.phase == phase), default=0) == max((m.bytes for m in moments if m.phase == phase), default=0)
    assert [int(m.name) for m in few] == sorted(int(m.name) for m in few)


@pytest.mark.parametrize("strategy", [{"sharding": "zero3"}, {"framework": "megatron", "tp": 2}, {"sharding": "zero2", "pp": 2}])
def test_the_highest_moment_is_the_peak(strategy: dict[str, object]) -> None:
    """Tensors alone: contexts and libraries are not the step's."""
    found = tw.estimate({"model": "gpt2", "cluster": "8xH100", "strategy": strategy})
    moments = found.table.memory.timeline(found.index)
    assert max(m.bytes for m in moments) == found.peak_bytes - found.memory_dict()["breakdown"]["framework"]
