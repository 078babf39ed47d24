"""The output error of quantised keys, quantised values and both, under full attention, head by head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvtune.analysis.evaluate import DecodeQueries, chunks, decode_queries
from kvtune.attention import attention_scores, merge_zones
from kvtune.attention.zones import Zone
from kvtune.quantisation import QuantisedLayer, quantised
from kvtune.traces import TimelineLayer

CASES = ("both", "keys", "values")
"""What is held in the precision; the rest is native."""
_CHUNK_ITEMS = 1 << 22
"""Scores held at once, [t, Hq, N] together."""


def head_errors(
    layer: TimelineLayer, precisions: Sequence[str], prompt_length: int
) -> dict[tuple[str, str], Tensor]:
    """‖o − o_full‖ / ‖o_full‖ of every decode step, [T, H, G] by (precision, case).

    Every step attends all tokens that it may see, held in the precision but for its native window; o_full
    is full attention over the recorded vectors.
    """
    steps = decode_queries(layer)
    held = {name: quantised(layer, name, prompt_length) for name in precisions}
    heads, group = steps.queries.shape[1:3]
    size = max(1, min(32, _CHUNK_ITEMS // (heads * group * layer.keys.shape[1])))
    parts: dict[tuple[str, str], list[Tensor]] = {(name, case): [] for name in held for case in CASES}
    for chunk in chunks(len(steps.positions), size):
        some = DecodeQueries(steps.queries[chunk], steps.positions[chunk], steps.turns[chunk])
        native = _scores(layer, some)
        exact = merge_zones([Zone(native, layer.values)], layer.info)[0]
        norm = torch.linalg.vector_norm(exact, dim=-1).clamp_min(1e-30)
        for name, view in held.items():
            for case, output in _outputs(layer, view, some, native):
                parts[name, case].append(torch.linalg.vector_norm(output - exact, dim=-1) / norm)
    return {key: torch.cat(found) for key, found in parts.items()}


def _scores(layer: TimelineLayer, steps: DecodeQueries) -> Tensor:
    """Logits over the keys of ``layer``, [t, H, G, N]."""
    return attention_scores(steps.queries, layer.keys, steps.positions, layer.key_positions, layer.info)


def _outputs(
    layer: TimelineLayer, view: QuantisedLayer, steps: DecodeQueries, native: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """The attention output [t, H, G, dv] of each case; ``native``: the logits of the recorded keys."""
    recent_keys, recent_values = (
        view.recent(layer.key_positions, steps.positions, part)[:, :, None] for part in ("keys", "values")
    )
    coded = torch.where(recent_keys, native, _scores(view, steps))
    yield "keys", merge_zones([Zone(coded, layer.values)], layer.info)[0]
    for case, logits in (("both", coded), ("values", native)):
        zones = [Zone(logits, view.values)]
        if bool(recent_values.any()):
            zones = [
                Zone(logits.masked_fill(recent_values, -torch.inf), view.values),
                Zone(logits.masked_fill(~recent_values, -torch.inf), layer.values),
            ]
        yield case, merge_zones(zones, layer.info)[0]
