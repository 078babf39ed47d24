"""Prompts of several sequences, prefilled one after the other, for a decoder that takes them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from kvtune.attention import group_queries
from kvtune.capturing.hook import DecodeQueries, QueryHook
from kvtune.capturing.loop import Session
from kvtune.geometry import ModelGeometry
from kvtune.models import LoadedModel, attention_through, cached
from kvtune.policies.plan import Plan
from kvtune.runtime.fused_decoder import layer_window


@dataclass(frozen=True)
class Prefilled:
    """One prompt behind its dense prefill.

    cache    its keys and values
    logits   [V] after its last token
    queries  by layer, the last ones of the prompt that the layer's policy wants, [H, G, W, d]
    """

    cache: DynamicCache
    logits: Tensor
    queries: Mapping[int, Tensor]


def prefill(loaded: LoadedModel, plan: Plan, ids: Sequence[int]) -> Prefilled:
    """Run a prompt through the model, as the engines do: its own attention, in chunks."""
    geometry = loaded.geometry
    numbers = range(geometry.n_layers)
    windows = {number: wanted for number in numbers if (wanted := layer_window(plan, number, loaded))}
    hook = QueryHook(list(windows), range(geometry.n_kv_heads), geometry.n_kv_heads, geometry.group)
    seen, session = DecodeQueries(), Session(loaded, room=len(ids))
    first = len(ids) - max(windows.values(), default=0)
    with attention_through(loaded.model, hook), hook.to(seen, first):
        session.feed(ids)
    queries = {
        number: group_queries(seen.take(number)[-window:], geometry.n_kv_heads).permute(1, 2, 0, 3)
        for number, window in windows.items()
    }
    return Prefilled(session.cache, session.logits, queries)


@dataclass(frozen=True)
class PromptLayer:
    """keys [B, H, N, d] and values [B, H, N, dv] of one layer, N the longest prompt."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class PromptLayers:
    """All layers, as :func:`kvtune.runtime.full_speed.time_full_steps` takes them."""

    layers: list[PromptLayer]


class PromptBatch:
    """Keys and values of B prompts of ``lengths`` tokens; zeros stand behind the shorter ones.

    ``place`` is where they are kept. :meth:`take` hands them over layer by layer and lets go of the layers
    before, so that prompts and the decoder that takes them need not be held in full at once.
    """

    def __init__(
        self, geometry: ModelGeometry, lengths: Sequence[int], dtype: torch.dtype, place: torch.device
    ) -> None:
        self.lengths = list(lengths)
        shape = len(self.lengths), geometry.n_kv_heads, max(self.lengths)
        self._layers = {
            number: PromptLayer(
                torch.zeros(*shape, geometry.head_dim, dtype=dtype, device=place),
                torch.zeros(*shape, geometry.value_dim, dtype=dtype, device=place),
            )
            for number in range(geometry.n_layers)
        }

    def put(self, sequence: int, cache: DynamicCache) -> None:
        """Copy the prompt of one sequence from the cache it was prefilled into."""
        length = self.lengths[sequence]
        for number, layer in self._layers.items():
            layer.keys[sequence, :, :length], layer.values[sequence, :, :length] = cached(cache, number)

    def repeat(self, sequence: int, other: int) -> None:
        """Let a sequence have the prompt of another, of the same length."""
        for layer in self._layers.values():
            layer.keys[sequence], layer.values[sequence] = layer.keys[other], layer.values[other]

    def cut(self, length: int, device: torch.device) -> PromptLayers:
        """The first ``length`` tokens of all sequences on ``device``: views where they are there already."""
        return PromptLayers(
            [
                PromptLayer(layer.keys[:, :, :length].to(device), layer.values[:, :, :length].to(device))
                for layer in self._layers.values()
            ]
        )

    def take(self, number: int, sequence: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """keys [H, n, d] and values [H, n, dv] of a prompt in a layer; the layers before it are forgotten."""
        for passed in [held for held in self._layers if held < number]:
            del self._layers[passed]
        layer, length = self._layers[number], self.lengths[sequence]
        return layer.keys[sequence, :, :length].to(device), layer.values[sequence, :, :length].to(device)
