"""Rotary positions: the ``--rope`` override, and length-dependent variants made constant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtune.errors import InputError, unknown

METHODS = ("yarn", "linear", "ntk", "dynamic")
_VARYING = ("dynamic", "longrope")


@dataclass(frozen=True)
class Rope:
    """How a model's rope was chosen: what to ask :func:`resolve_rope` for to get it again.

    ``override`` is the user's text (``yarn:4``) or ``None`` for the model's own; ``length`` the target
    length in tokens where the result depends on it, else ``None``.
    """

    override: str | None = None
    length: int | None = None


OWN_ROPE = Rope()
"""The rope that the model itself has."""


def parse_rope(text: str) -> tuple[str, float]:
    """``"yarn:4"`` → ``("yarn", 4.0)``. Raises ``InputError`` for an unknown method or a factor ≤ 1."""
    method, colon, number = text.partition(":")
    if method not in METHODS:
        raise unknown("rope method", method, METHODS)
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if not colon or not 1 < factor < 1e6:
        raise InputError(f"--rope '{text}' needs a factor above 1", f"write it like {method}:4")
    return method, factor


def resolve_rope(config: Any, wanted: Rope) -> Rope:
    """Set the decoder ``config``'s rope as ``wanted``, independent of the sequence length.

    Dynamic NTK and LongRoPE change their frequencies with the length seen so far: keys of a chunked prefill
    then differ from those of a whole one, and the state leaks between requests. Both are fixed as they would
    be at ``wanted.length`` tokens (``None``: all that the method is meant for). ``config`` is changed in
    place (``rope_parameters``, ``max_position_embeddings``). Returns ``wanted`` with the length dropped if
    it made no difference. Raises ``InputError`` if an override cannot be applied.
    """
    rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    varies = False
    if wanted.override is not None:
        method, factor = parse_rope(wanted.override)
        varies = method in _VARYING
        rope = _overridden(config, rope, method, factor, wanted.length)
    elif rope:
        parts = [rope] if "rope_type" in rope else [part for part in rope.values() if part]
        varies = any(part.get("rope_type") in _VARYING for part in parts)
        rope = _each(rope, lambda part: _fixed(config, part, wanted.length))
    if rope:
        config.rope_parameters = rope
    return Rope(wanted.override, wanted.length if varies else None)


def ntk_base(theta: float, alpha: float, dim: int) -> float:
    """The NTK-aware base θ·α^(d/(d-2)) for ``dim`` rotated dimensions."""
    return theta * alpha ** (dim / (dim - 2))


def _each(rope: dict[str, Any], change: Any) -> dict[str, Any]:
    """``change`` applied to the configuration, or to that of each layer type where there are several."""
    if "rope_type" in rope:
        return change(dict(rope))
    return {kind: change(dict(part)) if isinstance(part, Mapping) else part for kind, part in rope.items()}


def _overridden(
    config: Any, rope: dict[str, Any], method: str, factor: float, length: int | None
) -> dict[str, Any]:
    if "rope_theta" not in rope:
        why = "has a rope of its own for each layer type" if rope else "has no rotary positions"
        raise InputError(f"this {config.model_type} model {why}, so --rope cannot be applied")
    original = int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    reach = round(original * factor)
    kept: dict[str, Any] = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    config.max_position_embeddings = reach
    if method in ("ntk", "dynamic"):
        alpha = factor if method == "ntk" else _alpha(factor, length or reach, original)
        base = ntk_base(kept["rope_theta"], alpha, _rotated(config, rope))
        return {**kept, "rope_type": "default", "rope_theta": base}
    kept |= {"rope_type": method, "factor": factor}
    if method == "yarn":
        kept["original_max_position_embeddings"] = original
    return kept


def _fixed(config: Any, rope: dict[str, Any], length: int | None) -> dict[str, Any]:
    """``rope`` with a length-dependent method replaced by its constant at ``length``."""
    if rope.get("rope_type") == "dynamic":
        factor, original = float(rope.pop("factor")), config.max_position_embeddings
        reach = max(length or round(factor * original), original)
        base = ntk_base(rope["rope_theta"], _alpha(factor, reach, original), _rotated(config, rope))
        config.max_position_embeddings = reach
        return {**rope, "rope_type": "default", "rope_theta": base}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        chosen = "long_factor" if (length or config.max_position_embeddings) > original else "short_factor"
        return {**rope, "short_factor": rope[chosen], "long_factor": rope[chosen]}
    return rope


def _alpha(factor: float, length: int, original: int) -> float:
    """Dynamic NTK's stretch at ``length`` tokens (1 up to the trained length)."""
    return factor * max(length, original) / original - (factor - 1)


def _rotated(config: Any, rope: Mapping[str, Any]) -> int:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))
