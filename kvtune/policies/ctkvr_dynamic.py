"""CTkvr option ``dynamic``: hot centroids split, cold ones merge, while decoding goes on.

Decode steps fall into stretches of equal length. The centroids of a stretch follow from those of the one
before and from what its steps probed, and nothing else: steps selected again give the same stretches, however
many of them are selected at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvtune.policies.ctkvr_lists import InvertedLists

HOT, COLD = 2.0, 0.5
"""Uses above twice the mean split a centroid, uses below half of it let it merge."""


@dataclass
class Stretch:
    """The lists that serve some decode steps, and what those steps probed.

    queries [I, H, G, d] and probed [I, H, P] (-1: step not seen) are kept only with ``dynamic``;
    ``version`` counts their changes, ``made_from`` is the version of the stretch before that this follows.
    """

    lists: InvertedLists
    made_from: int = 0
    version: int = 0
    queries: Tensor | None = field(default=None, repr=False)
    probed: Tensor | None = field(default=None, repr=False)

    def note(self, steps: Tensor, queries: Tensor, probed: Tensor, length: int) -> None:
        """Remember the queries [t, H, G, d] and the probes [t, H, P] of ``steps`` [t] of ``length``."""
        if self.queries is None or self.probed is None:
            self.queries = queries.new_zeros(length, *queries.shape[1:])
            self.probed = probed.new_full((length, *probed.shape[1:]), -1)
        if not (self.probed[steps].equal(probed) and self.queries[steps].equal(queries)):
            self.queries[steps], self.probed[steps] = queries, probed
            self.version += 1


def next_centroids(stretch: Stretch) -> Tensor:
    """The centroids [H, C, G, d] after ``stretch``: as many as before.

    Per kv head, a list's uses are the steps that probed it. The coldest lists merge with their most similar
    cold ones, at the mean weighted by uses; each slot that this frees takes one half of a list that splits,
    the hottest first. A list splits into the means of the queries nearer to the least and to the most similar
    query that probed it.
    """
    centroids = stretch.lists.centroids.float().clone()
    if stretch.queries is None or stretch.probed is None:
        return centroids
    for head, mine in enumerate(centroids):
        probed = stretch.probed[:, head]
        uses = torch.bincount(probed[probed >= 0], minlength=len(mine)).float()
        hot = [
            c
            for c in torch.argsort(uses, descending=True, stable=True).tolist()
            if uses[c] > HOT * uses.mean()
        ]
        cold = [c for c in torch.argsort(uses, stable=True).tolist() if uses[c] < COLD * uses.mean()]
        for centroid in hot:
            if len(cold) < 2:
                break
            rows = stretch.queries[(probed == centroid).any(1), head].float()
            halves = _split(rows, mine[centroid])
            if halves is None:
                continue
            kept, freed = _closest(mine, cold)
            weights = uses[[kept, freed]] + 1
            mine[kept] = (weights[0] * mine[kept] + weights[1] * mine[freed]) / weights.sum()
            mine[centroid], mine[freed] = halves
            cold = [c for c in cold if c not in (kept, freed)]
    return centroids


def _unit(rows: Tensor) -> Tensor:
    return normalize(rows, dim=-1).flatten(-2)


def _split(rows: Tensor, centroid: Tensor) -> tuple[Tensor, Tensor] | None:
    """Two means [G, d] of the queries [n, G, d]; ``None`` where they are all alike."""
    unit = _unit(rows)
    similarity = unit @ _unit(centroid)
    near, far = unit[similarity.argmax()], unit[similarity.argmin()]
    away = unit @ far > unit @ near
    if bool(away.all()) or not bool(away.any()):
        return None
    return rows[~away].mean(0), rows[away].mean(0)


def _closest(centroids: Tensor, cold: list[int]) -> tuple[int, int]:
    """The coldest centroid and the cold one most similar to it."""
    similarity = _unit(centroids[cold[1:]]) @ _unit(centroids[cold[0]])
    return cold[0], cold[1 + int(similarity.argmax())]
