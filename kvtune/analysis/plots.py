"""Small plots as inline SVG: lines, bars and heatmaps, without any library.

Colours are CSS variables (``--s1`` … ``--s4``, ``--heat``, ``--ink`` …) that the page defines for light and
dark; every mark carries a ``<title>``, which browsers show on hover.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from kvtune.analysis.text import number, short

Show = Callable[[float], str]

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 46


@dataclass(frozen=True)
class Series:
    """One line: points (x, y), an optional band low…high around it; ``dashed`` for references."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """Maps values low…high to pixels start…stop, linearly or by logarithm."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.stop - self.start), 2)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers (1, 2 or 5 times a power of ten) that cover low…high."""
    span = high - low if high > low else abs(high) or 1.0
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around low…high, with 2 and 5 between where the span is under two decades."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [m * 10.0**power for power in range(first, last + 1) for m in factors]
    low_tick = max((t for t in ticks if t <= low * 1.0001), default=ticks[0])
    high_tick = min((t for t in ticks if t >= high * 0.9999), default=ticks[-1])
    return [t for t in ticks if low_tick <= t <= high_tick]


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    show: Show = number,
    log_x: bool = False,
    log_y: bool = False,
    x_ticks: Sequence[float] | None = None,
    y_range: tuple[float, float] | None = None,
) -> str:
    """Lines with points; NaN leaves a gap. ``show`` writes y values; ``y_range`` is widened, never cut."""
    series = [_finite(line) for line in series]
    xs = [x for line in series for x in line.x]
    ys = [y for line in series for part in (line.y, line.low or (), line.high or ()) for y in part]
    if not xs:
        return ""
    low, high = min([*ys, *(y_range or ())]), max([*ys, *(y_range or ())])
    ticks = log_ticks(max(low, 1e-12), max(high, 1e-12)) if log_y else nice_ticks(low, high)
    x_axis = Axis(min(xs), max(xs), LEFT + 10, WIDTH - RIGHT - 10, log_x)
    y_axis = Axis(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP, log_y)
    marks = _grid(y_axis, ticks, show, WIDTH)
    marks += _x_ticks(x_axis, x_ticks if x_ticks is not None else _whole_ticks(min(xs), max(xs)))
    marks += _labels(x_label, y_label, WIDTH, HEIGHT)
    for place, line in enumerate(series, start=1):
        marks += _band(line, place, x_axis, y_axis) + _line(line, place, x_axis, y_axis, show)
    return _svg(marks, WIDTH, HEIGHT, f"{y_label} against {x_label}") + legend(series)


def bar_chart(
    labels: Sequence[str],
    values: Sequence[float],
    x_label: str,
    y_label: str,
    *,
    show: Show = number,
    marks_at: Sequence[float] | None = None,
    mark_label: str = "",
    value_label: str = "mean",
) -> str:
    """Bars from zero; ``marks_at`` adds a short line per bar (a percentile), named ``mark_label``."""
    known = [v for v in [*values, *(marks_at or ())] if not math.isnan(v)]
    if not known:
        return ""
    ticks = nice_ticks(0, max(*known, 1e-9))
    y_axis = Axis(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    slot = (WIDTH - LEFT - RIGHT) / len(values)
    drawn = _grid(y_axis, ticks, show, WIDTH) + _labels(x_label, y_label, WIDTH, HEIGHT)
    every = max(1, math.ceil(len(values) * 22 / (WIDTH - LEFT - RIGHT)))
    for index, (label, value) in enumerate(zip(labels, values)):
        x, wide = LEFT + slot * (index + 0.15), slot * 0.7
        if index % every == 0:
            drawn.append(_text(x + wide / 2, HEIGHT - BOTTOM + 17, label, "tick", "middle"))
        if math.isnan(value):
            continue
        top, title = y_axis.at(value), f"{x_label} {label}: {value_label} {show(value)}"
        mark = marks_at[index] if marks_at else math.nan
        if not math.isnan(mark):
            title += f", {mark_label} {show(mark)}"
        drawn.append(f'<g><title>{escape(title)}</title><rect class="bar" x="{x:.1f}" y="{top}" ')
        drawn.append(f'width="{wide:.1f}" height="{max(0.0, HEIGHT - BOTTOM - top):.1f}"/>')
        if not math.isnan(mark):
            y = y_axis.at(mark)
            drawn.append(f'<line class="mark" x1="{x:.1f}" x2="{x + wide:.1f}" y1="{y}" y2="{y}"/>')
        drawn.append("</g>")
    names = [("bar-key", value_label), ("mark-key", mark_label)] if marks_at else []
    return _svg(drawn, WIDTH, HEIGHT, f"{y_label} by {x_label}") + _legend_row(names)


def heatmap(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    x_label: str,
    y_label: str,
    *,
    show: Show = number,
    cell_label: str = "",
    log: bool = False,
) -> str:
    """A matrix as coloured cells, first row on top; darker (on dark: brighter) is more; NaN stays empty.

    ``log`` colours positive values by their logarithm.
    """
    known = [value for row in values for value in row if not math.isnan(value)]
    if not known:
        return ""
    low, high = min(known), max(known)
    colour = Axis(low, high, 0.06, 1.0, log and low > 0)
    wide = (WIDTH - LEFT - RIGHT) / len(columns)
    tall = min(28.0, max(9.0, 420 / len(rows)))
    height = TOP + tall * len(rows) + BOTTOM
    drawn = _labels(x_label, y_label, WIDTH, height)
    for index, name in enumerate(rows):
        if index % max(1, math.ceil(13 / tall)) == 0:
            drawn.append(_text(LEFT - 8, TOP + tall * (index + 0.5) + 4, name, "tick", "end"))
    for index, name in enumerate(columns):
        if index % max(1, math.ceil(22 / wide)) == 0:
            x = LEFT + wide * (index + 0.5)
            drawn.append(_text(x, TOP + tall * len(rows) + 17, name, "tick", "middle"))
    for r, row in enumerate(values):
        for c, value in enumerate(row):
            if math.isnan(value):
                continue
            title = f"{y_label} {rows[r]}, {x_label} {columns[c]}: {cell_label} {show(value)}"
            drawn.append(
                f'<rect class="cell" x="{LEFT + c * wide:.1f}" y="{TOP + r * tall:.1f}" width="{wide:.1f}" '
                f'height="{tall:.1f}" fill-opacity="{colour.at(value)}">'
                f"<title>{escape(title)}</title></rect>"
            )
    note = " (logarithmic)" if colour.log else ""
    scale = (
        f'<p class="legend"><span>{show(low)}</span><i class="ramp"></i><span>{show(high)}{note}</span></p>'
    )
    return _svg(drawn, WIDTH, height, f"{cell_label} by {y_label} and {x_label}") + scale


def legend(series: Sequence[Series]) -> str:
    """Names of the lines (nothing for a single one without a band)."""
    if len(series) == 1 and series[0].low is None:
        return ""
    names = []
    for place, line in enumerate(series, start=1):
        names.append((f"key k{place}{' dashed' if line.dashed else ''}", line.label))
    return _legend_row(names)


def _legend_row(names: Sequence[tuple[str, str]]) -> str:
    items = [f'<span><i class="{kind}"></i>{escape(name)}</span>' for kind, name in names]
    return f'<p class="legend">{"".join(items)}</p>' if items else ""


def _finite(line: Series) -> Series:
    """The line without its NaN points."""
    kept = [i for i, y in enumerate(line.y) if not math.isnan(y)]
    low = None if line.low is None else [line.low[i] for i in kept]
    high = None if line.high is None else [line.high[i] for i in kept]
    return Series(line.label, [line.x[i] for i in kept], [line.y[i] for i in kept], low, high, line.dashed)


def _whole_ticks(low: float, high: float) -> list[float]:
    """Round whole numbers inside low…high."""
    ticks = nice_ticks(low, high, 8) if high - low > 8 else [float(v) for v in range(int(low), int(high) + 1)]
    return [tick for tick in ticks if low <= tick <= high and tick == int(tick)]


def _grid(axis: Axis, ticks: Sequence[float], show: Show, width: float) -> list[str]:
    drawn = []
    for tick in ticks:
        y = axis.at(tick)
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y}" y2="{y}"/>')
        drawn.append(_text(LEFT - 8, y + 4, short(show(tick)), "tick", "end"))
    return drawn


def _x_ticks(axis: Axis, ticks: Sequence[float]) -> list[str]:
    drawn, free = [], -math.inf
    for tick in ticks:
        x = axis.at(tick)
        if x < free:
            continue
        free = x + 24
        drawn.append(_text(x, HEIGHT - BOTTOM + 17, short(number(tick)), "tick", "middle"))
    return drawn


def _labels(x_label: str, y_label: str, width: float, height: float) -> list[str]:
    middle = TOP + (height - TOP - BOTTOM) / 2
    return [
        _text(LEFT + (width - LEFT - RIGHT) / 2, height - 8, x_label, "axis", "middle"),
        f'<text class="axis" text-anchor="middle" transform="translate(14 {middle:.1f}) rotate(-90)">'
        f"{escape(y_label)}</text>",
    ]


def _band(line: Series, place: int, x_axis: Axis, y_axis: Axis) -> list[str]:
    if line.low is None or line.high is None or len(line.x) < 2:
        return []
    upper = [f"{x_axis.at(x)},{y_axis.at(y)}" for x, y in zip(line.x, line.high)]
    lower = [f"{x_axis.at(x)},{y_axis.at(y)}" for x, y in zip(line.x, line.low)]
    return [f'<polygon class="band b{place}" points="{" ".join(upper + lower[::-1])}"/>']


def _line(line: Series, place: int, x_axis: Axis, y_axis: Axis, show: Show) -> list[str]:
    points = [(x_axis.at(x), y_axis.at(y)) for x, y in zip(line.x, line.y)]
    path = " ".join(f"{x},{y}" for x, y in points)
    dashed = " dashed" if line.dashed else ""
    drawn = [f'<polyline class="line l{place}{dashed}" points="{path}"/>']
    for index, (x, y) in enumerate(points):
        title = f"{line.label}, {short(number(line.x[index]))}: {show(line.y[index])}"
        if line.low is not None and line.high is not None:
            title += f" ({show(line.low[index])} to {show(line.high[index])})"
        drawn.append(
            f'<g><title>{escape(title)}</title><circle class="hit" cx="{x}" cy="{y}" r="9"/>'
            f'<circle class="dot d{place}" cx="{x}" cy="{y}" r="3"/></g>'
        )
    return drawn


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(marks: Sequence[str], width: float, height: float, label: str) -> str:
    head = f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(label)}">'
    return head + "".join(marks) + "</svg>"
