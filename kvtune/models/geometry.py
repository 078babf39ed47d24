"""Geometry read from a model's configuration, and what the attention hook cannot serve, by layer class."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvtune.errors import InputError
from kvtune.geometry import ModelGeometry
from kvtune.models.adapters import attention_modules, decoder_config

_SERVED_TYPES = ("full_attention", "sliding_attention")


def read_geometry(config: Any, dtype: str) -> ModelGeometry:
    """The geometry that the decoder's configuration promises (:func:`kvtune.models.probe.confirm` checks it).

    ``dtype`` is the precision the model runs in (``float32``, ``float16``, ``bfloat16``).
    """
    n_layers, n_heads = config.num_hidden_layers, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // n_heads
    return ModelGeometry(
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=getattr(config, "num_key_value_heads", None) or n_heads,
        head_dim=head_dim,
        value_dim=getattr(config, "v_head_dim", None) or head_dim,
        dtype=dtype,
        max_positions=config.max_position_embeddings,
        scaling=_scaling(config, head_dim),
        windows=_windows(config, n_layers),
        softcaps=(getattr(config, "attn_logit_softcapping", None),) * n_layers,
        sinks=(False,) * n_layers,
        rope=dict(getattr(config, "rope_parameters", None) or {}),
    )


def refuse_unserved(model: PreTrainedModel) -> None:
    """Raise ``InputError``, naming the layer class, if the hook cannot capture ``model`` faithfully.

    Works on a model without weights (device ``meta``). What a configuration does not tell is left to
    :func:`kvtune.models.probe.confirm`.
    """
    config = decoder_config(model)
    attention = attention_modules(model)
    for layer in range(config.num_hidden_layers):
        module = attention.get(layer)
        why = "is no attention layer" if module is None else _unserved(config, module, layer)
        if why:
            name = _layer_class(model, layer) if module is None else type(module).__name__
            raise InputError(f"layer {layer} of this model ({name}) {why}, which kvtune cannot capture yet")


def _unserved(config: Any, module: nn.Module, layer: int) -> str | None:
    """Why this attention layer cannot be captured, ``None`` if it can."""
    types = getattr(config, "layer_types", None)
    if types and types[layer] not in _SERVED_TYPES:
        return f"uses {types[layer].replace('_', ' ')}"
    if getattr(config, "kv_lora_rank", None):
        return "compresses its keys and values (multi-head latent attention)"
    if getattr(config, "attn_logit_softcapping", None):
        return "caps its logits (softcap)"
    if getattr(module, "sinks", None) is not None:
        return "has attention sinks"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "adds position biases (ALiBi)"
    if getattr(config, "num_kv_shared_layers", 0):
        return "may share the keys of another layer"
    if not getattr(module, "is_causal", True):
        return "is not causal"
    return None


def _layer_class(model: PreTrainedModel, layer: int) -> str:
    """Class of whatever stands at ``layer`` instead of attention."""
    numbered = [module for module in model.modules() if getattr(module, "layer_idx", None) == layer]
    if numbered:
        return type(numbered[-1]).__name__  # the innermost: a block may know its number too
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > layer:
            return type(module[layer]).__name__
    return type(model).__name__


def _scaling(config: Any, head_dim: int) -> float:
    scalar = getattr(config, "query_pre_attn_scalar", None)
    if scalar:
        return scalar**-0.5
    multiplier = getattr(config, "attention_multiplier", None)
    return float(multiplier) if multiplier else head_dim**-0.5


def _windows(config: Any, n_layers: int) -> tuple[int | None, ...]:
    """A window w lets a query at p see positions p-w+1 … p."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return (None,) * n_layers
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * n_layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)
