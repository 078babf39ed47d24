"""Timelines: the root-to-leaf paths of a sample's segment tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtune.errors import InputError
from kvtune.traces.layer import TimelineLayer
from kvtune.traces.schema import ANSWERS, Segment

if TYPE_CHECKING:
    from kvtune.traces.reader import Trace


@dataclass(frozen=True)
class Branch:
    """A root-to-leaf path: its segments, and the ids of those whose queries it shows."""

    segments: tuple[Segment, ...]
    asking: frozenset[int]


def branches(segments: list[Segment]) -> Iterator[Branch]:
    """The paths of one sample, by ascending leaf.

    Every path shows the queries of its context and questions. A ``generated`` segment's queries belong to
    the first path through it, so that each decode query is met exactly once.
    """
    parents = {segment.parent for segment in segments}
    taken: set[int] = set()
    for leaf in segments:
        if leaf.segment in parents:
            continue
        chain = [leaf]
        while chain[-1].parent >= 0:
            chain.append(segments[chain[-1].parent])
        chain.reverse()
        asking = {s.segment for s in chain if s.kind != "generated" or s.segment not in taken}
        taken |= {s.segment for s in chain if s.kind == "generated"}
        yield Branch(tuple(chain), frozenset(asking))


@dataclass(frozen=True)
class Timeline:
    """The tokens of one path, from the first context token to the last answer token.

    ``index`` numbers the timelines of a sample; ``turns`` are those whose decode queries lie on this one.
    A query at position p sees every key of the timeline at positions ≤ p, cut by its layer's window.
    """

    trace: Trace = field(repr=False)
    sample: int
    index: int
    branch: Branch = field(repr=False)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.branch.segments

    @property
    def request(self) -> int:
        return self.segments[-1].request

    @property
    def turns(self) -> tuple[int, ...]:
        return tuple(
            s.turn for s in self.segments if s.kind == "generated" and s.segment in self.branch.asking
        )

    @property
    def prompt_length(self) -> int:
        """Tokens before the first answer: what an engine prefills."""
        return next((s.start for s in self.segments if s.kind in ANSWERS), len(self))

    def __len__(self) -> int:
        """Tokens of the whole timeline."""
        return self.segments[-1].stop

    @cached_property
    def token_ids(self) -> Tensor:
        """[N] int64, the whole timeline."""
        return torch.cat([self.trace.tokens(self.sample, s.segment) for s in self.segments])

    def layer(self, layer: int) -> TimelineLayer:
        """One layer's vectors. Raises ``InputError`` if the trace does not hold that layer."""
        if layer not in self.trace.layers:
            held = ", ".join(map(str, self.trace.layers))
            raise InputError(f"the trace holds no layer {layer}", f"it holds: {held}")
        return TimelineLayer(self, layer)
