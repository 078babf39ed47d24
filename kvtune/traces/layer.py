"""One layer of a timeline: its keys, values and queries, read from the trace's files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtune.errors import InputError
from kvtune.geometry import LayerInfo
from kvtune.traces.files import VectorFile, empty
from kvtune.traces.integrity import check_finite, damaged

if TYPE_CHECKING:
    from kvtune.traces.timeline import Timeline


@dataclass(frozen=True)
class TimelineLayer:
    """Vectors of one layer on one timeline, read when first asked for and kept while this object lives.

    H is the trace's kv heads, Hq their query heads. Tensors are on the CPU, of the trace's dtype. Anything
    read raises ``TraceError`` naming the file if that is damaged.
    """

    timeline: Timeline
    layer: int

    @cached_property
    def info(self) -> LayerInfo:
        """The layer, reduced to the heads that the trace holds."""
        return self.timeline.trace.layer_info(self.layer)

    @cached_property
    def keys(self) -> Tensor:
        """[H, N, d], finite: raises ``TraceError`` naming layer, head and position of one that is not."""
        keys = self._gather("key", self.info.head_dim)
        trace = self.timeline.trace
        check_finite(
            keys,
            sample=self.timeline.sample,
            layer=self.layer,
            heads=trace.kv_heads,
            positions=self.key_positions,
        )
        return keys

    @cached_property
    def values(self) -> Tensor:
        """[H, N, dv]. Raises ``InputError`` if the trace was captured without values."""
        if not self.timeline.trace.has_values:
            raise InputError("this trace holds no values", "capture it without --no-values")
        return self._gather("value", self.info.value_dim)

    @cached_property
    def key_positions(self) -> Tensor:
        """[N] int64: 0…N-1, every token of a timeline has a key."""
        return torch.arange(len(self.timeline))

    def to(self, device: torch.device | str) -> TimelineLayer:
        """The same layer with its vectors on ``device``, read at once."""
        if torch.device(device).type == "cpu":
            return self
        moved = TimelineLayer(self.timeline, self.layer)
        vectors = {"keys": self.keys, "key_positions": self.key_positions}
        if self.timeline.trace.has_values:
            vectors["values"] = self.values
        vars(moved).update({name: tensor.to(device) for name, tensor in vectors.items()})
        vars(moved)["_asked"] = tuple(tensor.to(device) for tensor in self._asked)
        return moved

    @property
    def queries(self) -> Tensor:
        """[T, Hq, d], ascending in position."""
        return self._asked[0]

    @property
    def query_positions(self) -> Tensor:
        """[T] int64."""
        return self._asked[1]

    @property
    def turns(self) -> Tensor:
        """[T] int64."""
        return self._asked[2]

    @property
    def steps(self) -> Tensor:
        """[T] int64: decode step within the turn, -1 for prompt queries."""
        return self._asked[3]

    @property
    def decode(self) -> Tensor:
        """[T] bool: whether the query belongs to a decode step."""
        return self.steps >= 0

    @property
    def phases(self) -> list[str]:
        """[T] of 'prompt' | 'decode'."""
        return ["decode" if decode else "prompt" for decode in self.decode.tolist()]

    @property
    def o_proj(self) -> Tensor | None:
        """Output projection [hidden, Hq × dv] of the heads held, or ``None`` if it was not captured."""
        return self.timeline.trace.o_proj(self.layer)

    @cached_property
    def _vectors(self) -> tuple[VectorFile, dict[tuple[int, ...], list[int]]]:
        """The file of keys and values, and its row groups by (segment, kv head)."""
        file = self.timeline.trace.kv_file(self.timeline.sample, self.layer)
        return file, file.groups_by("segment", "kv_head")

    def _gather(self, column: str, dim: int) -> Tensor:
        file, groups = self._vectors
        trace = self.timeline.trace
        out = empty((len(trace.kv_heads), len(self.timeline), dim), trace.dtype)
        for segment in self.timeline.segments:
            for row, head in enumerate(trace.kv_heads):
                at = segment.start
                for group in groups.get((segment.segment, head), []):
                    stop = at + file.rows(group)
                    if file.bounds(group, "position") != (at, stop - 1):
                        break
                    file.copy_into(out[row, at:stop], group, column)
                    at = stop
                if at != segment.stop:
                    raise damaged(file.path, f"segment {segment.segment}, head {head} lacks position {at}")
        return out

    @cached_property
    def _asked(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, positions, turns, steps."""
        file = self.timeline.trace.query_file(self.timeline.sample, self.layer)
        groups = file.groups_by("segment")
        chosen = [
            group
            for s in self.timeline.segments
            if s.segment in self.timeline.branch.asking
            for group in groups.get((s.segment,), [])
        ]
        return _read_queries(file, chosen, self.info, self.timeline.trace.dtype)


def _read_queries(
    file: VectorFile, groups: list[int], info: LayerInfo, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads = info.n_heads
    rows = [file.rows(group) for group in groups]
    if any(count % heads for count in rows):
        raise damaged(file.path, f"a row group does not hold {heads} heads per query")
    queries = empty((sum(rows) // heads, heads, info.head_dim), dtype)
    columns = torch.empty(3, sum(rows) // heads, dtype=torch.int64)
    at = 0
    for group, count in zip(groups, rows):
        steps = slice(at, at + count // heads)
        file.copy_into(queries[steps].flatten(0, 1), group, "query")
        for column, ids in zip(columns, file.ids(group, "position", "turn", "step")):
            column[steps] = torch.from_numpy(ids[::heads].copy())
        at = steps.stop
    return queries, columns[0], columns[1], columns[2]


def reduced(info: LayerInfo, kv_heads: tuple[int, ...]) -> LayerInfo:
    """``info`` as if the layer had only ``kv_heads`` and their query heads."""
    group = info.group
    heads = [head * group + g for head in kv_heads for g in range(group)]

    def per_head(numbers: tuple[float, ...] | None) -> tuple[float, ...] | None:
        return None if numbers is None else tuple(numbers[head] for head in heads)

    return replace(
        info,
        n_heads=len(heads),
        n_kv_heads=len(kv_heads),
        sinks=per_head(info.sinks),
        alibi=per_head(info.alibi),
    )
