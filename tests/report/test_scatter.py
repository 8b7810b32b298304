"""The picture of predicted against measured is well-formed, complete and readable without color."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from trainwright.report.scatter import scatter_svg

values = st.floats(1e-6, 1e12)
points = st.lists(st.tuples(values, values, st.sampled_from(["fsdp2", "megatron", "a<b&c"]), st.text(max_size=8)), min_size=1, max_size=30)


@given(points)
def test_any_points_make_a_picture_that_parses(found: list[tuple[float, float, str, str]]) -> None:
    printable = [(m, p, g, "".join(c for c in label if c.isprintable())) for m, p, g, label in found]
    root = ET.fromstring(scatter_svg(printable, "title <1>", "s"))
    titles = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum("measured" in t for t in titles) >= len(found)


def test_an_exact_prediction_lies_on_the_diagonal() -> None:
    root = ET.fromstring(scatter_svg([(1.0, 1.0, "a", "x"), (100.0, 100.0, "a", "y")], "t", "s"))
    marks = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert all(abs(x + y - 560) < 0.2 for x, y in marks[:2])


def test_groups_differ_in_shape_not_in_color_alone() -> None:
    svg = scatter_svg([(1.0, 1.0, "a", "x"), (2.0, 2.0, "b", "y")], "t", "s")
    assert "<circle" in svg
    assert "<path" in svg
