from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from kvtune.analysis.named_plots import LINE, Point, row_chart, scatter_chart

NAMES = ["wave_index", "quest", "<b>", "full"]
SVG = re.compile(r"<svg.*?</svg>", re.DOTALL)


def drawn(plot: str) -> ElementTree.Element:
    found = SVG.search(plot)
    assert found
    return ElementTree.fromstring(found.group())


def labels(plot: str) -> dict[str, ElementTree.Element]:
    return {text.text or "": text for text in drawn(plot).iter("text")}


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(0, 10)), min_size=1, max_size=12))
def test_no_label_covers_another_and_every_point_is_inside(places):
    names = [f"policy_{number:02d}" for number in range(len(places))]
    plot = scatter_chart([Point(name, *at) for name, at in zip(names, places)], "bytes", "error")
    root = drawn(plot)
    dots = [dot for dot in root.iter("circle") if "dot" in dot.attrib["class"]]
    assert len(dots) == len(places)
    for dot in dots:
        assert 0 <= float(dot.attrib["cx"]) <= 560 and 0 <= float(dot.attrib["cy"]) <= 340
    found = [labels(plot)[name] for name in names]
    top = float(root.attrib["viewBox"].split()[1])
    assert all(float(text.attrib["y"]) >= top + 8 for text in found)
    spans = []
    for text, name in zip(found, names):
        x, wide = float(text.attrib["x"]), 6.5 * len(name)
        left = x if text.attrib["text-anchor"] == "start" else x - wide
        spans.append((left, left + wide, float(text.attrib["y"])))
    for place, (left, right, y) in enumerate(spans):
        for other_left, other_right, other in spans[:place]:
            assert left >= other_right or other_left >= right or abs(y - other) >= LINE - 0.2


def test_more_bytes_lie_further_right_and_more_error_higher():
    plot = scatter_chart([Point("a", 10, 0.1), Point("b", 1000, 0.9, aside=True)], "bytes", "error")
    first, second = (dot for dot in drawn(plot).iter("circle") if "dot" in dot.attrib["class"])
    assert float(first.attrib["cx"]) < float(second.attrib["cx"])
    assert float(first.attrib["cy"]) > float(second.attrib["cy"])
    assert first.attrib["class"] != second.attrib["class"]


def test_bars_are_as_long_as_their_values():
    plot = row_chart(NAMES, [1.0, 2.0, 0.0, math.nan], "error", marks_at=[2, 4, 0, 1], mark_label="p95")
    bars = [float(bar.attrib["width"]) for bar in drawn(plot).iter("rect")]
    assert len(bars) == 3
    assert bars[1] / bars[0] == 2 and bars[2] < 1
    assert "<b>" not in plot and "&lt;b&gt;" in plot
    assert "p95" in plot


def test_nothing_known_draws_nothing():
    assert row_chart(["a"], [math.nan], "error") == ""
    assert scatter_chart([Point("a", math.nan, 1.0)], "bytes", "error") == ""
