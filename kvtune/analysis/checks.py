"""What must hold before a trace is measured: layers that it has, vectors that are finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtune.errors import InputError
from kvtune.traces import TimelineLayer, Trace, check_finite


def chosen_layers(trace: Trace, layers: Iterable[int] | None) -> list[int]:
    """``layers`` ascending, each once (``None``: all of the trace); ``InputError`` for one it lacks."""
    if layers is None:
        return list(trace.layers)
    chosen = sorted(set(layers))
    missing = [number for number in chosen if number not in trace.layers]
    if missing or not chosen:
        held = ", ".join(map(str, trace.layers))
        what = f"layer {missing[0]} is not in the trace" if missing else "no layer is chosen"
        raise InputError(what, f"it holds: {held}")
    return chosen


def served_layers(trace: Trace, layers: Sequence[int]) -> list[int]:
    """Those of ``layers`` that a policy can serve: the ones without a sliding window of their own.

    Windowed layers stay dense under every policy, so measures of its quality leave them out: pooled with
    them, a policy of a hybrid model would look several times better than it is. Where every layer has a
    window, all of them are returned.
    """
    windows = trace.geometry.windows
    return [number for number in layers if windows[number] is None] or list(layers)


def check_vectors(layer: TimelineLayer) -> None:
    """Refuse NaN and infinite queries and values (keys are checked where they are read)."""
    trace, group = layer.timeline.trace, layer.info.group
    query_heads = [head * group + place for head in trace.kv_heads for place in range(group)]
    place = {"sample": layer.timeline.sample, "layer": layer.layer}
    by_head = layer.queries.transpose(0, 1)
    check_finite(by_head, **place, heads=query_heads, positions=layer.query_positions, what="query")
    if trace.has_values:
        check_finite(layer.values, **place, heads=trace.kv_heads, positions=layer.key_positions, what="value")
