"""Which methods the fused engine serves, and by which layer. A new one is one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtune.errors import InputError
from kvtune.geometry import LayerInfo
from kvtune.policies.base import Policy
from kvtune.policies.plan import Plan
from kvtune.runtime import fused_ctkvr, fused_quest, fused_wave
from kvtune.runtime.fused_ctkvr import FusedCTkvr
from kvtune.runtime.fused_layer import FusedLayer, RangeLayer
from kvtune.runtime.fused_offload import FusedWaveOffload
from kvtune.runtime.fused_quest import FusedQuest
from kvtune.runtime.fused_wave import FusedWave

LARGEST_GROUP = 16
"""Query heads of a kv head that a tile holds."""


@dataclass(frozen=True)
class Method:
    """How a policy decodes by kernels.

    make        ``(policy, info, new_tokens) -> layer``
    serves      ``(policy, info) -> bool``: whether these parameters and this layer are modelled
    unserved    why not, where they are not
    offloaded   the layer that keeps its blocks in host memory, made with the cache fraction as well;
                ``None``: keys and values stay on the device
    """

    make: Callable[[Any, LayerInfo, int], FusedLayer]
    serves: Callable[[Any, LayerInfo], bool] = lambda policy, info: True
    unserved: str = ""
    offloaded: Callable[[Any, LayerInfo, int, float], FusedLayer] | None = None


METHODS: dict[str, Method] = {
    "full": Method(lambda policy, info, new: RangeLayer(info, 0, info.window)),
    "sliding_window": Method(lambda policy, info, new: RangeLayer(info, 0, policy.window)),
    "streaming": Method(lambda policy, info, new: RangeLayer(info, policy.sink, policy.recent)),
    "wave_index": Method(
        lambda policy, info, new: FusedWave(info, policy, new),
        fused_wave.serves,
        "pinned spans, refresh and softcaps are not in the wave index's kernels",
        lambda policy, info, new, fraction: FusedWaveOffload(info, policy, new, fraction),
    ),
    "quest": Method(
        lambda policy, info, new: FusedQuest(info, policy),
        fused_quest.serves,
        "Quest's kernels serve no windows",
    ),
    "ctkvr": Method(
        lambda policy, info, new: FusedCTkvr(info, policy),
        fused_ctkvr.serves,
        "of CTkvr's options the kernels serve those that change only its build",
    ),
}


def refusal(policy: Policy, info: LayerInfo) -> str | None:
    """Why the fused engine cannot serve ``policy`` in this layer; ``None`` if it can."""
    if info.group > LARGEST_GROUP:
        return f"{info.group} query heads share a kv head, the kernels take {LARGEST_GROUP}"
    if info.alibi is not None or info.sinks is not None:
        return "ALiBi and attention sinks are not in the kernels"
    method = METHODS.get(policy.name)
    if method is None:
        return f"there are no kernels for policy '{policy.name}'"
    return None if method.serves(policy, info) else method.unserved


def plan_refusal(plan: Plan, layers: list[LayerInfo]) -> str | None:
    """The first :func:`refusal` of a plan's layers."""
    reasons = (refusal(plan.for_layer(info), info) for info in layers)
    return next((reason for reason in reasons if reason is not None), None)


def offloads(plan: Plan, layers: list[LayerInfo]) -> bool:
    """Whether any layer of the plan can keep its blocks in host memory."""
    return any(METHODS[plan.for_layer(info).name].offloaded is not None for info in layers)


def fused_layer(
    policy: Policy, info: LayerInfo, new_tokens: int, offload: str, cache_fraction: float
) -> FusedLayer:
    """The layer that decodes under ``policy``; ``InputError`` where there is none."""
    reason = refusal(policy, info)
    if reason is not None:
        raise InputError(f"the fused engine: {reason}", "use --engine torch")
    method = METHODS[policy.name]
    if offload == "cpu" and method.offloaded is not None:
        return method.offloaded(policy, info, new_tokens, cache_fraction)
    return method.make(policy, info, new_tokens)
