"""The attention function of a capture: it lets queries be seen on their way to sdpa, and changes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvtune.models import sdpa

Sink = Callable[[int, int, Tensor], None]
"""Receives (layer, position of the first query, queries [t, Hq, d]): a view, to be copied if kept."""


class QueryHook:
    """A transformers attention function that shows queries to a sink, then hands everything on to sdpa.

    ``layers`` and ``kv_heads`` choose what is shown: of kv head h the query heads h·group … h·group+group-1
    (query head q reads kv head ``q // group``). No attention weights are asked for and no mask is made: the
    vectors are what the model's own attention is given, after the rotary positions. Batches of one.
    """

    def __init__(self, layers: Sequence[int], kv_heads: Sequence[int], n_kv_heads: int, group: int) -> None:
        self._layers = frozenset(layers)
        self._heads: Tensor | None = None
        if len(kv_heads) < n_kv_heads:
            self._heads = torch.tensor([head * group + g for head in kv_heads for g in range(group)])
        self._sink: Sink | None = None
        self._first = 0

    @contextmanager
    def to(self, sink: Sink, first: int = 0) -> Iterator[None]:
        """Show queries at positions ≥ ``first`` to ``sink`` for the length of a ``with`` block."""
        self._sink, self._first = sink, first
        try:
            yield
        finally:
            self._sink = None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """query [1, Hq, T, d], key [1, H, N, d], value [1, H, N, dv]; the last query stands at N - 1."""
        layer: Any = module.layer_idx
        if self._sink is not None and layer in self._layers:
            start = key.shape[2] - query.shape[2]
            unwanted = max(0, self._first - start)
            if unwanted < query.shape[2]:
                shown = query[0, :, unwanted:] if self._heads is None else self._some(query, unwanted)
                self._sink(layer, start + unwanted, shown.transpose(0, 1))
        return sdpa(module, query, key, value, mask, **options)

    def _some(self, query: Tensor, unwanted: int) -> Tensor:
        assert self._heads is not None
        return query[0, self._heads.to(query.device), unwanted:]


class DecodeQueries:
    """A sink that keeps one answer's queries until its segment is known."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Tensor]] = defaultdict(list)

    def __call__(self, layer: int, position: int, queries: Tensor) -> None:
        self._kept[layer].append(queries.clone())

    def take(self, layer: int) -> Tensor:
        """The queries [steps, Hq, d] of ``layer``, which are then forgotten."""
        return torch.cat(self._kept.pop(layer))
