"""A short run that proves the hook sees what the configuration promises, before anything is captured."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvtune.errors import InputError
from kvtune.geometry import ModelGeometry
from kvtune.models.adapters import attention_through, cached, device_of, feed, new_cache, sdpa

_CHUNKS = (5, 3, 1)
_BIASES = {
    "softcap": "caps its logits (softcap)",
    "s_aux": "has attention sinks",
    "sinks": "has attention sinks",
    "position_bias": "adds position biases",
    "alibi": "adds position biases (ALiBi)",
}


@dataclass
class _Call:
    """What one layer handed to the attention function in one forward pass."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]


def confirm(model: PreTrainedModel, geometry: ModelGeometry) -> ModelGeometry:
    """``geometry`` with dimensions and scaling as the hook sees them in three short chunks.

    Raises ``InputError``, naming the layer class, where a layer bypasses the hook, shares or transforms its
    cached keys, biases its scores, masks by another rule than causality and the window, or differs from the
    other layers in shape or scaling.
    """
    calls: dict[int, list[_Call]] = defaultdict(list)

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any):
        calls[getattr(module, "layer_idx", -1)].append(_Call(module, query, key, value, mask, options))
        return sdpa(module, query, key, value, mask, **options)

    device = device_of(model)
    cache = new_cache()
    with attention_through(model, attend):
        seen = 0
        for width in _CHUNKS:
            ids = torch.arange(seen, seen + width, device=device) % model.config.get_text_config().vocab_size
            feed(model, ids, cache)
            seen += width
    for layer in range(geometry.n_layers):
        if len(calls[layer]) != len(_CHUNKS):
            raise InputError(
                f"layer {layer} of this {type(model).__name__} does not pass its queries and keys to the "
                "attention function once a step, so kvtune cannot capture it"
            )
    geometry = _adopt(geometry, calls[0][0])
    for layer in range(geometry.n_layers):
        position = 0
        for call in calls[layer]:
            why = _unfit(geometry, layer, call, position)
            if why:
                raise InputError(
                    f"layer {layer} of this model ({type(call.module).__name__}) {why}, "
                    "which kvtune cannot capture yet"
                )
            position += call.query.shape[2]
        if not torch.equal(call.key[0], cached(cache, layer)[0]):
            raise InputError(
                f"layer {layer} of this model ({type(call.module).__name__}) does not attend to the keys "
                "it caches, which kvtune cannot capture yet"
            )
    return geometry


def _adopt(geometry: ModelGeometry, call: _Call) -> ModelGeometry:
    return replace(
        geometry,
        n_heads=call.query.shape[1],
        n_kv_heads=call.key.shape[1],
        head_dim=call.key.shape[3],
        value_dim=call.value.shape[3],
        scaling=_scaling(call),
    )


def _scaling(call: _Call) -> float:
    scaling = call.options.get("scaling")
    return float(scaling) if scaling is not None else call.query.shape[-1] ** -0.5


def _unfit(geometry: ModelGeometry, layer: int, call: _Call, position: int) -> str | None:
    """What is wrong with a call whose first query stands at ``position``; ``None`` if nothing is."""
    for option, why in _BIASES.items():
        if call.options.get(option) is not None:
            return why
    if _scaling(call) != geometry.scaling:
        return "scales its scores differently from the first layer"
    seen = position + call.query.shape[2]
    expected = (
        (1, geometry.n_heads, call.query.shape[2], geometry.head_dim),
        (1, geometry.n_kv_heads, seen, geometry.head_dim),
        (1, geometry.n_kv_heads, seen, geometry.value_dim),
    )
    if (call.query.shape, call.key.shape, call.value.shape) != expected:
        return "differs in shape from the first layer"
    if call.options.get("is_causal", getattr(call.module, "is_causal", True)) is False:
        return "is not causal"
    window = call.options.get("sliding_window")
    if window is not None and window != geometry.windows[layer]:
        return f"has a window of {window} tokens that its configuration does not tell"
    return (
        None
        if _mask_fits(call.mask, position, seen, geometry.windows[layer])
        else "masks by a rule of its own"
    )


def _mask_fits(mask: Tensor | None, position: int, seen: int, window: int | None) -> bool:
    """Whether ``mask`` [1, 1, T, seen] is causality and the window, and nothing else."""
    queries = torch.arange(position, seen)[:, None]
    keys = torch.arange(seen)[None]
    rule = keys <= queries
    if window is not None:
        rule &= keys > queries - window
    if mask is None:
        # Without a mask sdpa is causal for a first chunk and unmasked for a single query.
        causal = torch.tril(torch.ones_like(rule)) if position == 0 else torch.ones_like(rule)
        return bool((rule == causal).all()) and (position == 0 or seen - position == 1)
    mask = mask[..., :seen].cpu()
    if mask.shape[:2] != (1, 1):
        return False
    if mask.dtype != torch.bool:
        if (mask[mask > torch.finfo(mask.dtype).min / 2] != 0).any():
            return False
        mask = mask > torch.finfo(mask.dtype).min / 2
    return bool((mask[0, 0] == rule).all())
