"""Which methods the fused engine serves, and by which layer. A new one is one row."""

from __future__ import annotations

from kvtune.errors import InputError
from kvtune.geometry import LayerInfo
from kvtune.policies.base import Policy
from kvtune.policies.ctkvr import CTkvr
from kvtune.policies.full import Full
from kvtune.policies.plan import Plan
from kvtune.policies.quest import Quest
from kvtune.policies.sliding_window import SlidingWindow
from kvtune.policies.streaming import Streaming
from kvtune.policies.wave_index import WaveIndex
from kvtune.runtime import fused_ctkvr, fused_quest, fused_wave
from kvtune.runtime.fused_layer import FusedLayer, RangeLayer
from kvtune.runtime.fused_offload import FusedWaveOffload
from kvtune.runtime.fused_wave import FusedWave

LARGEST_GROUP = 16
"""Query heads of a kv head that a tile holds."""


def refusal(policy: Policy, info: LayerInfo) -> str | None:
    """Why the fused engine cannot serve ``policy`` in this layer; ``None`` if it can."""
    if info.group > LARGEST_GROUP:
        return f"{info.group} query heads share a kv head, the kernels take {LARGEST_GROUP}"
    if info.alibi is not None or info.sinks is not None:
        return "ALiBi and attention sinks are not in the kernels"
    if isinstance(policy, Full | SlidingWindow | Streaming):
        return None
    if isinstance(policy, WaveIndex):
        served = fused_wave.serves(policy, info)
        return None if served else "pinned spans, refresh and softcaps are not in the wave index's kernels"
    if isinstance(policy, Quest):
        return None if fused_quest.serves(policy, info) else "Quest's kernels serve no windows"
    if isinstance(policy, CTkvr):
        served = fused_ctkvr.serves(policy, info)
        return None if served else "of CTkvr's options the kernels serve those that change only its build"
    return f"there are no kernels for policy '{policy.name}'"


def plan_refusal(plan: Plan, layers: list[LayerInfo]) -> str | None:
    """The first :func:`refusal` of a plan's layers."""
    reasons = (refusal(plan.for_layer(info), info) for info in layers)
    return next((reason for reason in reasons if reason is not None), None)


def fused_layer(
    policy: Policy, info: LayerInfo, new_tokens: int, offload: str, cache_fraction: float
) -> FusedLayer:
    """The layer that decodes under ``policy``; ``InputError`` where there is none."""
    reason = refusal(policy, info)
    if reason is not None:
        raise InputError(f"the fused engine: {reason}", "use --engine torch")
    if isinstance(policy, WaveIndex):
        if offload == "cpu":
            return FusedWaveOffload(info, policy, new_tokens, cache_fraction)
        return FusedWave(info, policy, new_tokens)
    if isinstance(policy, Quest):
        return fused_quest.FusedQuest(info, policy)
    if isinstance(policy, CTkvr):
        return fused_ctkvr.FusedCTkvr(info, policy)
    if isinstance(policy, Streaming):
        return RangeLayer(info, policy.sink, policy.recent)
    if isinstance(policy, SlidingWindow):
        return RangeLayer(info, 0, policy.window)
    return RangeLayer(info, 0, info.window)
