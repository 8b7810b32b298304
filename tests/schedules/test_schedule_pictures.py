"""Pictures say what the replay found: blocks where actions are, numbers, the critical path, memory; in SVG, HTML, a trace, JSON and a terminal."""

from __future__ import annotations

import json
import re
import time
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import numpy as np
import pytest

from trainwright.report.perfetto import to_trace
from trainwright.report.timeline import busy_shares, layout_of, ticks, to_svg
from trainwright.report.timeline_html import figures, to_html
from trainwright.report.timeline_text import to_text
from trainwright.schedules import SCHEDULES
from trainwright.schedules.replay import schedule

SVG = "{http://www.w3.org/2000/svg}"


def drawn(svg: str) -> list[ElementTree.Element]:
    return [g for g in ElementTree.fromstring(svg).iter(f"{SVG}g") if g.get("id")]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_action_is_a_block_of_its_place_length_and_name(name):
    t = schedule(name, 4, 8, forward=1, backward=2, weight=1, p2p=0.25)
    blocks = drawn(to_svg(t))
    assert len(blocks) == len(t.table)
    layout = layout_of([t])
    for block in blocks:
        row = int(block.get("id").removeprefix("p0r"))
        rect, title = block.find(f"{SVG}rect"), block.find(f"{SVG}title").text
        assert float(rect.get("x")) == pytest.approx(float(layout.x(t.row_start[row])), abs=0.01)
        assert float(rect.get("width")) == pytest.approx((t.row_end[row] - t.row_start[row]) * layout.scale, abs=0.01)
        assert f"microbatch {t.table.microbatch[row]} on stage {t.table.stage[row]} " in title
        assert rect.get("fill").startswith(f"url(#{'FIWB'[t.table.kind[row]]}")
    critical = {int(b.get("id").removeprefix("p0r")) for b in blocks if " c" in b.find(f"{SVG}rect").get("class")}
    assert set(t.critical_path) <= critical


def test_blocks_of_a_rank_do_not_overlap_and_labels_fit_their_block():
    t = schedule("dualpipe-v", 8, 16, forward=1, backward=1, weight=1)
    for block in drawn(to_svg(t)):
        rect, label = block.find(f"{SVG}rect"), block.find(f"{SVG}text")
        if label is not None:
            size = float(re.search(r"font-size:([\d.]+)px", label.get("style")).group(1))
            assert 7 <= size <= 11
            assert len(label.text) * size * 0.6 <= float(rect.get("width"))
            assert size <= float(rect.get("height"))


def test_idle_time_says_why():
    svg = to_svg(schedule("1f1b", 4, 8))
    assert "rank 3 idle 3 (ramp)" in svg
    assert "rank 0 idle 6 (wait), waits for 1B0" in svg
    assert "rank 3 idle 6 (flush)" in svg


def test_kinds_differ_without_color():
    """Every fill has a pattern of its own, and they are apart in lightness where blocks are too thin for one."""
    from trainwright.report.timeline import SOLID, _patterns

    bodies = [re.sub(r'fill="#\w+"|stroke="#\w+"', "", p.split("</rect>")[-1].split("/>", 1)[1]) for p in _patterns(1)[::2]]
    assert len(set(bodies)) == len(bodies)
    light = sorted(np.dot([int(c[i : i + 2], 16) for i in (1, 3, 5)], [0.299, 0.587, 0.114]) for c in SOLID.values())
    assert min(np.diff(light)) > 20
    assert light[-1] < 225, "apart from the idle background too"


def test_two_schedules_share_one_scale():
    a, b = schedule("1f1b", 4, 8), schedule("zb-h1", 4, 8, forward=1, backward=1, weight=1)
    svg = to_svg([a, b])
    first = {g.get("id"): float(g.find(f"{SVG}rect").get("width")) for g in drawn(svg)}
    assert first["p0r0"] == pytest.approx(first["p1r0"], abs=0.01)
    assert svg.count("activations held") == 2


def test_page_is_self_contained():
    page = to_html([schedule("1f1b", 4, 8), schedule("gpipe", 4, 8)], note="one & two")
    assert "one &amp; two" in page
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert page.replace("http://www.w3.org/2000/svg", "").count("http") == 0
    for word in ("idle/total", "idle/useful", "span", "27.27%", "37.50%", "lower bound"):
        assert word in page


def test_figures_name_all_three_bubbles():
    values = {name: value for name, value, _ in figures(schedule("1f1b", 4, 8))}
    assert values["bubble, idle/total"] == "27.27%"
    assert values["bubble, idle/useful"] == "37.50%"
    assert values["makespan"] == "33"
    assert values["peak activations"] == "1 to 4"


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "looped-bfs"])
def test_shares_of_a_slice_add_up_to_the_work(name):
    t = schedule(name, 4, 16, forward=1, backward=2, weight=1, p2p=0.3)
    for bins in (7, 64, 1000):
        shares = busy_shares(t, bins)
        assert shares.sum(axis=(1, 2)) == pytest.approx(t.busy_per_rank)
        assert shares.sum(axis=1).max() <= t.makespan / bins + 1e-9
        assert shares.min() >= -1e-9


@pytest.mark.parametrize(("sizes", "detail"), [((4, 8, 1), "numbered"), ((64, 128, 1), "block"), ((64, 512, 1), "share")])
def test_detail_follows_the_number_of_actions(sizes, detail):
    t = schedule("1f1b", *sizes)
    assert layout_of([t]).detail == detail
    ElementTree.fromstring(to_svg(t))


def test_a_quarter_of_a_million_actions_are_drawn_in_two_seconds():
    t = schedule("interleaved-1f1b", 64, 512, 4)
    assert len(t.table) == 262_144
    for draw in (to_svg, to_trace):
        begun = time.process_time()
        draw(t)
        assert time.process_time() - begun < 2, draw.__name__


def test_trace_has_a_slice_an_action_and_an_arrow_a_message():
    t = schedule("dualpipe", 4, 8, forward=1, backward=1, weight=1, gather=0.5)
    trace = json.loads(to_trace(t))
    events = trace["traceEvents"]
    slices = [e for e in events if e["ph"] == "X" and e["cat"] != "collective"]
    assert len(slices) == len(t.table)
    assert sum(e["ph"] == "X" and e["cat"] == "collective" for e in events) == len(t.collectives) == 8
    starts, ends = [e for e in events if e["ph"] == "s"], [e for e in events if e["ph"] == "f"]
    assert len(starts) == len(ends) == t.messages == trace["metadata"]["messages"]
    assert all(a["id"] == b["id"] and a["pid"] != b["pid"] and a["ts"] <= b["ts"] for a, b in zip(starts, ends))
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in slices:
        lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in lanes.values():
        spans.sort()
        assert all(a[1] <= b[0] + 0.01 for a, b in pairwise(spans)), "slices of a lane do not overlap"
    highest = max(e["args"]["microbatches"] for e in events if e["ph"] == "C")
    assert highest == max(t.peak_per_rank)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_terminal_picture_fits_its_width(name, width):
    lines = to_text(schedule(name, 4, 8, forward=1, backward=1, weight=1, p2p=0.1), width).plain.splitlines()
    assert max(map(len, lines[:5])) <= width
    assert [line.split()[1] for line in lines[:4]] == ["0", "1", "2", "3"]
    assert len({len(line) for line in lines[:4]}) == 1


def test_terminal_picture_of_1f1b():
    lines = to_text(schedule("1f1b", 2, 2), 40).plain.splitlines()
    assert lines[0] == "rank 0 F0░F1░······B0▓▓▓▓···B1▓▓▓▓"
    assert lines[1] == "rank 1 ···F0░B0▓▓▓▓F1░B1▓▓▓▓······"
    assert lines[2].startswith("time   |0")


def test_more_ranks_than_lines_are_sampled():
    lines = to_text(schedule("1f1b", 100, 100), 120).plain.splitlines()
    assert lines[0].startswith("rank 0 ")
    assert lines[63].startswith("rank 99")


@pytest.mark.parametrize("length", [0.003, 1, 7.5, 33, 1583.25, 9e6])
def test_ticks_are_few_and_inside(length):
    found = ticks(length)
    assert 4 <= len(found) <= 12
    assert found[0] == 0
    assert found[-1] <= length
