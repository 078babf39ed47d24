"""Plots of things that have names: horizontal bars, and labelled points in a plane (see ``plots``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kvtune.analysis.plots import Axis, Show, nice_ticks
from kvtune.analysis.text import number, short

WIDTH, HEIGHT = 560, 340
LEFT, NAMES, RIGHT, TOP, BOTTOM = 64, 132, 92, 12, 46
LINE = 14
"""Pixels between two labels."""


@dataclass(frozen=True)
class Point:
    """A named point; ``aside``: a reference, drawn in another colour."""

    label: str
    x: float
    y: float
    aside: bool = False


def scatter_chart(
    points: Sequence[Point], x_label: str, y_label: str, *, show_x: Show = number, show_y: Show = number
) -> str:
    """Points with their names beside them; x in doublings where it spans more than a factor of four."""
    points = [p for p in points if math.isfinite(p.x) and math.isfinite(p.y)]
    if not points:
        return ""
    x_axis, x_ticks = _x_axis([p.x for p in points])
    y_ticks = nice_ticks(0, max(*(p.y for p in points), 1e-9))
    y_axis = Axis(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    drawn = []
    for tick in y_ticks:
        y = y_axis.at(tick)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 14}" y1="{y}" y2="{y}"/>')
        drawn.append(_text(LEFT - 8, y + 4, short(show_y(tick)), "tick", "end"))
    free = -math.inf
    for x, tick in ((x_axis.at(tick), tick) for tick in x_ticks):
        if x >= free:
            free = x + 64
            drawn.append(_text(x, HEIGHT - BOTTOM + 17, show_x(tick), "tick", "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    drawn.append(_text((LEFT + WIDTH - 14) / 2, HEIGHT - 8, x_label, "axis", "middle"))
    drawn.append(
        f'<text class="axis" text-anchor="middle" transform="translate(14 {middle:.1f}) rotate(-90)">'
        f"{escape(y_label)}</text>"
    )
    places = [(x_axis.at(p.x), y_axis.at(p.y)) for p in points]
    heights = _label_heights([p.label for p in points], places)
    for point, (x, y), label_y in zip(points, places, heights):
        title = f"{point.label}: {show_x(point.x)}, {show_y(point.y)}"
        drawn.append(
            f'<g><title>{escape(title)}</title><circle class="hit" cx="{x}" cy="{y}" r="9"/>'
            f'<circle class="dot d{2 if point.aside else 1}" cx="{x}" cy="{y}" r="4"/></g>'
        )
        right = _on_right(x)
        drawn.append(
            _text(x + (9 if right else -9), label_y + 4, point.label, "tick", "start" if right else "end")
        )
    return _svg(drawn, HEIGHT, f"{y_label} against {x_label}", top=math.floor(min(4.0, *heights)) - 5)


def _x_axis(values: Sequence[float]) -> tuple[Axis, list[float]]:
    """An axis with room at both ends, and its ticks."""
    log = min(values) > 0 and max(values) > 4 * min(values)
    if log:
        low, high = min(values) / 1.35, max(values) * 1.35
    else:
        room = 0.12 * (max(values) - min(values) or abs(max(values)) or 1.0)
        low, high = min(values) - room, max(values) + room
    if log:
        ticks = [2.0**power for power in range(math.floor(math.log2(low)), math.ceil(math.log2(high)))]
    else:
        ticks = nice_ticks(low, high)
    return Axis(low, high, LEFT, WIDTH - 14, log), [tick for tick in ticks if low <= tick <= high]


def row_chart(
    names: Sequence[str],
    values: Sequence[float],
    x_label: str,
    *,
    show: Show = number,
    marks_at: Sequence[float] | None = None,
    mark_label: str = "",
) -> str:
    """One horizontal bar a name, first on top, from zero; ``marks_at`` adds a short line to each.

    NaN leaves a row empty; the value stands at the end of its bar.
    """
    known = [v for v in [*values, *(marks_at or ())] if math.isfinite(v)]
    if not known:
        return ""
    tall = 24
    height = TOP + tall * len(names) + 34
    axis = Axis(0, max(*known, 1e-12), NAMES, WIDTH - RIGHT)
    drawn = [_text((NAMES + WIDTH - RIGHT) / 2, height - 10, x_label, "axis", "middle")]
    for place, (name, value) in enumerate(zip(names, values)):
        y = TOP + tall * place
        drawn.append(_text(NAMES - 8, y + 16, name, "tick", "end"))
        if not math.isfinite(value):
            continue
        mark = marks_at[place] if marks_at else math.nan
        text, end = show(value), axis.at(value)
        title = f"{name}: {text}"
        if math.isfinite(mark):
            title += f", {mark_label} {show(mark)}"
            text += f" / {show(mark)}"
        drawn.append(
            f'<g><title>{escape(title)}</title><rect class="bar" x="{NAMES}" y="{y + 4}" '
            f'width="{max(end - NAMES, 0.5):.1f}" height="{tall - 8}"/>'
        )
        if math.isfinite(mark):
            x = axis.at(mark)
            drawn.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{y + 3}" y2="{y + tall - 3}"/>')
            end = max(end, x)
        drawn.append(f"</g>{_text(end + 6, y + 16, text, 'tick', 'start')}")
    key = f'<p class="legend"><span><i class="mark-key"></i>{escape(mark_label)}</span></p>'
    return _svg(drawn, height, x_label) + (key if mark_label else "")


def _label_heights(labels: Sequence[str], places: Sequence[tuple[float, float]]) -> list[float]:
    """Heights of the labels of points, raised where one would cover another (6.5 pixels a letter)."""
    heights = [0.0] * len(labels)
    placed: list[tuple[float, float, float]] = []
    for place in sorted(range(len(labels)), key=lambda at: -places[at][1]):
        x, y = places[place]
        wide = 6.5 * len(labels[place]) + 9
        left, right = (x, x + wide) if _on_right(x) else (x - wide, x)
        for other_left, other_right, other in sorted(placed, key=lambda label: -label[2]):
            if left < other_right and other_left < right and abs(y - other) < LINE:
                y = other - LINE
        placed.append((left, right, y))
        heights[place] = y
    return heights


def _on_right(x: float) -> bool:
    """Whether a point's label stands on its right."""
    return x < WIDTH * 0.62


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(drawn: Sequence[str], height: float, label: str, top: int = 0) -> str:
    """The drawing from ``top`` (below 0 where labels were raised that far) to ``height``."""
    box = f"0 {top} {WIDTH} {height - top:.0f}"
    head = f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}">'
    return head + "".join(drawn) + "</svg>"
