"""What differs between transformers releases (5.16 on), or needs more than one of its calls."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from kvtune.errors import InputError

Attend = Callable[..., tuple[Tensor, Any]]
"""transformers' attention function: ``(module, query [B, Hq, T, d], key [B, H, N, d], value [B, H, N, dv],
attention_mask, scaling=…, **kwargs) -> (output [B, T, Hq, dv], None)``."""

_active: set[str] = set()
"""Registered names in use; the others are free to be given out again."""


def sdpa(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """transformers' own scaled-dot-product attention: what a hook hands its arguments on to."""
    return AttentionInterface()["sdpa"](module, *args, **kwargs)


@contextmanager
def attention_through(model: PreTrainedModel, attend: Attend) -> Iterator[None]:
    """Send every attention layer of ``model`` through ``attend`` for the length of a ``with`` block.

    The name is registered for masks too, with sdpa's mask function: an attention function without one is
    given no mask, and every prefill chunk after the first then attends wrongly.
    Raises ``InputError``, naming the class, if the model does not use transformers' attention interface.
    """
    name = next(name for name in map("kvtune_{}".format, count()) if name not in _active)
    _active.add(name)
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])
    previous = model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
        if decoder_config(model)._attn_implementation != name:
            raise InputError(
                f"{type(model).__name__} does not let its attention be replaced, so it cannot be captured"
            )
        yield
    finally:
        if model.config._attn_implementation == name:
            model.set_attn_implementation(previous)
        AttentionInterface.register(name, sdpa)
        _active.remove(name)


def decoder_config(model: PreTrainedModel) -> Any:
    """The configuration of the text decoder (multimodal models nest it)."""
    return model.config.get_text_config(decoder=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars off the user's terminal for the length of a ``with`` block."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def new_cache(room: int = 0) -> DynamicCache:
    """A cache that keeps every key of every layer, those outside a sliding window included.

    Made without a config on purpose: with one, windowed layers would drop what left their window. Their
    masks still apply. With ``room`` its layers have buffers of so many tokens (doubled when full) that are
    written in place; without, every token copies all of its layer, which also leaves a C heap in pieces
    (a run of 3 × 4,096 tokens held 6 GB instead of 1.4).
    """
    cache: Any = DynamicCache()
    if room:
        cache.layer_class_to_replicate = partial(_BufferedLayer, room)
    return cache


class _BufferedLayer(DynamicLayer):
    """Keys and values [1, H, n, d] as views of buffers with room to grow; cropping shortens the views."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.get_seq_length()
        end = held + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < end:
            room = self._room if self._buffers is None else 2 * self._buffers[0].shape[-2]
            self._buffers = (
                _with_room(self.keys, held, key_states, max(room, end)),
                _with_room(self.values, held, value_states, max(room, end)),
            )
        for buffer, states in zip(self._buffers, (key_states, value_states)):
            buffer[..., held:end, :] = states
        self.keys, self.values = (buffer[..., :end, :] for buffer in self._buffers)
        return self.keys, self.values


def _with_room(old: Any, held: int, like: Tensor, room: int) -> Tensor:
    """A buffer of ``room`` tokens that begins with the ``held`` tokens of ``old``."""
    buffer = like.new_empty(*like.shape[:-2], room, like.shape[-1])
    if held:
        buffer[..., :held, :] = old
    return buffer


def feed(model: PreTrainedModel, ids: Tensor, cache: DynamicCache, keep: int = 1) -> Tensor:
    """Run ``ids`` [T] after what ``cache`` holds and add them to it.

    Returns the logits of the last ``keep`` tokens, [keep, vocabulary] (``keep=0``: of all T).
    """
    accepted = inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {"cache" if "cache" in accepted else "past_key_values": cache}
    if "logits_to_keep" in accepted:
        arguments["logits_to_keep"] = keep
    with torch.inference_mode():
        logits = model(input_ids=ids[None], use_cache=True, **arguments).logits[0]
    return logits[-keep:] if keep else logits


def cached(cache: DynamicCache, layer: int) -> tuple[Tensor, Tensor]:
    """Keys [H, N, d] and values [H, N, dv] that ``cache`` holds for ``layer`` (views)."""
    held: Any = cache.layers[layer]
    return held.keys[0], held.values[0]


def device_of(model: PreTrainedModel) -> torch.device:
    """Where the model's inputs belong."""
    return next(model.parameters()).device


def crop(cache: DynamicCache, length: int) -> None:
    """Forget all but the first ``length`` tokens. The kept part is a view until the cache grows again."""
    surplus = cache.get_seq_length() - length
    if surplus > 0:
        cache.crop(-surplus)


def count_parameters(config: Any) -> int:
    """Weights of a causal language model of this configuration (tied ones once); nothing is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.parameters())


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The decoder's attention module of each layer, by layer index (layers of another kind are absent)."""
    found: dict[int, nn.Module] = {}
    for module in model.get_decoder().modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and "Attention" in type(module).__name__:
            found.setdefault(index, module)
    return found


class PassingCache(Cache):
    """A cache that keeps nothing: an attention function that stores keys itself is given each token's own.

    For single decode steps (:func:`decode_step`), whose positions are given and whose masks are not used.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def decode_step(model: PreTrainedModel, ids: Tensor, positions: Tensor, cache: PassingCache) -> Tensor:
    """Logits [B, vocabulary] after one token of each of B sequences: ids [B, 1] at positions [B, 1].

    Waits for nothing on the host, so that it can be captured in a CUDA graph. A mask of four dimensions is
    handed to the attention function as it is, which ignores it.
    """
    accepted = inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {"cache" if "cache" in accepted else "past_key_values": cache}
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    with torch.inference_mode():
        result = model(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, **arguments
        )
    return result.logits[:, -1]
