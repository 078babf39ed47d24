"""A recorded layer as an engine with a quantised cache holds it: what any policy then selects from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvtune.attention.zones import Zone, exact_zone
from kvtune.geometry import PAGE_TOKENS, LayerInfo
from kvtune.policies.base import Selection
from kvtune.quantisation.base import PARTS, Part
from kvtune.quantisation.plan import HeadPrecision, PrecisionPlan, as_precision_plan
from kvtune.traces import TimelineLayer


@dataclass(frozen=True)
class QuantisedLayer(TimelineLayer):
    """``source`` with dequantised keys and values, each kv head in its own precision.

    Keys, values and queries are float32. An index built on this view sees every token coded; at each step,
    attention reads the tokens of the native window (KIVI) as they were (:meth:`exact_zone`).
    ``calibrated``: leading tokens that fixed scales are taken from.
    """

    source: TimelineLayer
    precisions: tuple[HeadPrecision, ...]
    calibrated: int

    @cached_property
    def info(self) -> LayerInfo:
        return self.source.info

    @cached_property
    def keys(self) -> Tensor:
        """[H, N, d] float32."""
        return self._coded(self.source.keys, "keys")

    @cached_property
    def values(self) -> Tensor:
        """[H, N, dv] float32."""
        return self._coded(self.source.values, "values")

    @cached_property
    def queries(self) -> Tensor:  # type: ignore[override]
        """[T, Hq, d] float32: the recorded ones."""
        return self.source.queries.float()

    @property
    def key_positions(self) -> Tensor:  # type: ignore[override]
        return self.source.key_positions

    @property
    def query_positions(self) -> Tensor:
        return self.source.query_positions

    @property
    def turns(self) -> Tensor:
        return self.source.turns

    @property
    def steps(self) -> Tensor:
        return self.source.steps

    def exact_zone(self, native: Zone, queries: Tensor, positions: Tensor, selection: Selection) -> Zone:
        """The exact tokens of ``selection`` as stored; ``native`` is the same zone in full precision.

        queries [T, H, G, d], positions [T], as in :func:`kvtune.attention.exact_zone`.
        """
        coded = exact_zone(queries, positions, self.keys, self.values, selection, self.info)
        keys = self.recent(selection.positions, positions, "keys")[:, :, None]
        values = self.recent(selection.positions, positions, "values")[..., None]
        return Zone(
            torch.where(keys, native.logits, coded.logits),
            torch.where(values, native.values.float(), coded.values),
        )

    def recent(self, tokens: Tensor, positions: Tensor, part: Part) -> Tensor:
        """Which of ``tokens`` [T, H, S] (or [N]) are in the native window at steps ``positions`` [T]."""
        lengths = positions + 1
        first = torch.stack([p.of(part).native_from(lengths, part) for p in self.precisions], 1)
        return tokens >= first[..., None]

    def read_bytes(self, selection: Selection, positions: Tensor) -> Tensor:
        """Bytes a step reads from device memory, [T, H] int64: as ``Selection.read_bytes``, tokens as stored.

        Pages hold coded tokens; what tokens of the native window need more is added. What the index reads
        (scan, estimation) stays in the model's precision.
        """
        total = selection.read_bytes(self.info).double()
        for part in PARTS:
            stored, native = self.token_bytes(part).to(total.device), self._native_bytes(part)
            recent = (self.recent(selection.positions, positions, part) & (selection.positions >= 0)).sum(-1)
            total = total + (stored - native) * (selection.pages() * PAGE_TOKENS - recent)
        return total.ceil().long()

    def token_bytes(self, part: Part) -> Tensor:
        """Bytes of a coded token's key or value in each kv head, [H] float64."""
        dim = self.info.head_dim if part == "keys" else self.info.value_dim
        item = self.info.item_bytes
        sizes = [precision.of(part).token_bytes(dim, part, item) for precision in self.precisions]
        return torch.tensor(sizes, dtype=torch.float64)

    def _native_bytes(self, part: Part) -> int:
        dim = self.info.head_dim if part == "keys" else self.info.value_dim
        return dim * self.info.item_bytes

    def _coded(self, vectors: Tensor, part: Part) -> Tensor:
        out = torch.empty(vectors.shape, device=vectors.device)
        for precision in {head.of(part) for head in self.precisions}:
            rows = [row for row, head in enumerate(self.precisions) if head.of(part) == precision]
            out[rows] = precision.coded(vectors[rows], part, self.calibrated)
        return out


def quantised(
    layer: TimelineLayer, precision: str | HeadPrecision | PrecisionPlan, prompt_length: int
) -> QuantisedLayer:
    """``layer`` held in ``precision`` (a name, or what each head uses); scales come from the prompt.

    Raises ``InputError`` for unknown names and a trace without values (when they are asked for).
    """
    heads = layer.timeline.trace.kv_heads
    precisions = as_precision_plan(precision).for_layer(layer.layer, heads)
    return QuantisedLayer(layer.timeline, layer.layer, layer, precisions, prompt_length)
