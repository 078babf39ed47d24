from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.analysis.plots import Axis, Series, bar_chart, heatmap, line_chart, log_ticks, nice_ticks
from kvtune.analysis.text import number, percent, short, size, tokens


def parsed(html):
    """The elements of a plot and its legend, or an error if it is not well formed."""
    return list(ElementTree.fromstring(f"<div>{html}</div>").iter())


def titles(html):
    return [element.text for element in parsed(html) if element.tag == "title"]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_cover_the_range_in_equal_round_steps(low, span):
    ticks = nice_ticks(low, low + span)
    step = ticks[1] - ticks[0]
    assert ticks[0] <= low + 1e-6 * step and ticks[-1] >= low + span - 1e-6 * step
    assert len(ticks) <= 9
    assert min(abs(step / 10.0 ** math.floor(math.log10(step) + 1e-9) - m) for m in (1, 2, 5)) < 1e-3


@given(st.floats(1e-6, 1e6), st.floats(1.01, 1e6))
def test_log_ticks_cover_the_range(low, factor):
    ticks = log_ticks(low, low * factor)
    assert ticks == sorted(ticks)
    assert ticks[0] <= low * 1.001 and ticks[-1] >= low * factor * 0.999


def test_a_flat_range_still_has_an_axis():
    assert len(nice_ticks(3, 3)) >= 2
    assert Axis(2, 2, 0, 100).at(2) == 50


def test_axes_map_linearly_and_by_logarithm():
    assert Axis(0, 10, 100, 200).at(2.5) == 125
    assert Axis(1, 100, 0, 200, log=True).at(10) == 100


def test_a_line_chart_says_every_point_on_hover_and_skips_nan():
    line = Series("measured", [1, 2, 4], [0.5, math.nan, 0.25], [0.4, math.nan, 0.2], [0.6, math.nan, 0.3])
    html = line_chart([line], "lag", "share", show=percent, log_x=True, x_ticks=[1, 2, 4])
    assert titles(html) == ["measured, 1: 50% (40% to 60%)", "measured, 4: 25% (20% to 30%)"]
    assert "nan" not in html.lower()
    texts = [element.text for element in parsed(html) if element.tag == "text"]
    assert {"lag", "share", "1", "2", "4"} <= set(texts)


def test_text_from_outside_is_escaped():
    html = line_chart([Series("<b>&", [0, 1], [0, 1]), Series("x", [0, 1], [1, 0])], "<x>", "y")
    assert "<b>" not in html and "<x>" not in html
    assert parsed(html)


def test_bars_stand_on_zero_and_carry_their_mark():
    html = bar_chart(["0", "1"], [1.0, 2.0], "layer", "error", marks_at=[3.0, 4.0], mark_label="p95")
    bars = [element for element in parsed(html) if element.get("class") == "bar"]
    ends = {float(bar.get("y")) + float(bar.get("height")) for bar in bars}
    assert len(ends) == 1
    heights = [float(bar.get("height")) for bar in bars]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)
    assert titles(html) == ["layer 0: mean 1.00, p95 3.00", "layer 1: mean 2.00, p95 4.00"]


def test_heatmap_colours_rise_with_the_value():
    html = heatmap(["0", "1"], ["0", "1"], [[1.0, 10.0], [100.0, math.nan]], "head", "layer", log=True)
    shades = [float(shade) for shade in re.findall(r'fill-opacity="([\d.]+)"', html)]
    assert shades == [0.06, 0.53, 1.0]
    assert len(titles(html)) == 3


@pytest.mark.parametrize(
    "empty",
    [
        line_chart([Series("a", [1.0], [math.nan])], "x", "y"),
        bar_chart(["0"], [math.nan], "x", "y"),
        heatmap(["0"], ["0"], [[math.nan]], "x", "y"),
    ],
)
def test_nothing_to_show_draws_nothing(empty):
    assert empty == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (percent(0.0312), "3.1%"), (percent(0.42), "42%"), (percent(0.0), "0%"), (percent(math.nan), "–"),
        (number(0.39), "0.390"), (number(1.266), "1.27"), (number(31.06), "31.1"), (number(2084.4), "2,084"),
        (number(0.000133), "1.3e-04"), (number(0.0), "0.000"), (number(None), "–"), (number(0.9999), "1.00"),
        (tokens(9.96), "10"), (tokens(7.22), "7.2"), (tokens(101.4), "101"), (tokens(math.nan), "–"),
        (size(1536), "1.5 KiB"), (size(3 << 30), "3.0 GiB"), (size(12), "12 B"), (size(math.nan), "–"),
        (short("0.500"), "0.5"), (short("1.00"), "1"), (short("60%"), "60%"), (short("100"), "100"),
        (short("1.3e-10"), "1.3e-10"),
    ],
)  # fmt: skip
def test_numbers_read_well(text, expected):
    assert text == expected
