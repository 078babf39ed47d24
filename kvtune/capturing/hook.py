"""The attention function of a capture: it lets queries be seen on their way to sdpa, and changes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvtune.models import sdpa

Sink = Callable[[int, int, Tensor], None]
"""Receives (layer, position of the first query, queries [t, Hq, d]): a view, to be copied if kept."""


class Listener:
    """Who is shown queries at the moment, and from which position on."""

    def __init__(self) -> None:
        self._sink: Sink | None = None
        self._first = 0

    @property
    def present(self) -> bool:
        """Whether anyone listens."""
        return self._sink is not None

    @contextmanager
    def to(self, sink: Sink, first: int = 0) -> Iterator[None]:
        """Show queries at positions ≥ ``first`` to ``sink`` for the length of a ``with`` block."""
        self._sink, self._first = sink, first
        try:
            yield
        finally:
            self._sink = None

    def show(self, layer: int, queries: Tensor, length: int, heads: Tensor | None = None) -> None:
        """Pass on the wanted ones of queries [T, Hq, d], the last of which stands at ``length`` - 1.

        ``heads`` chooses query heads (``None``: all).
        """
        start = length - len(queries)
        unwanted = max(0, self._first - start)
        if self._sink is not None and unwanted < len(queries):
            shown = queries[unwanted:]
            self._sink(layer, start + unwanted, shown if heads is None else shown[:, heads.to(shown.device)])


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
        self._listener = Listener()

    def to(self, sink: Sink, first: int = 0) -> AbstractContextManager[None]:
        """Show queries at positions ≥ ``first`` to ``sink`` for the length of a ``with`` block."""
        return self._listener.to(sink, first)

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
        if layer in self._layers:
            self._listener.show(layer, query[0].transpose(0, 1), key.shape[2], self._heads)
        return sdpa(module, query, key, value, mask, **options)


class DecodeQueries:
    """A sink that keeps one answer's queries until its segment is known."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Tensor]] = defaultdict(list)

    def __call__(self, layer: int, position: int, queries: Tensor) -> None:
        self._kept[layer].append(queries.clone())

    def take(self, layer: int) -> Tensor:
        """The queries [steps, Hq, d] of ``layer``, which are then forgotten."""
        return torch.cat(self._kept.pop(layer))
