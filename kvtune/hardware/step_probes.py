"""Timing a sparse decode step whole and without its stages, one setting after another.

A stage's time is what a step loses without it (see :mod:`kvtune.hardware.step_fit`). With keys and values on
the device a step loses in turn the new token, the scan, the choice, the list of rows and the estimates;
exact attention and the merge are left. With clusters in host memory it loses the fetch, then lookup and
estimates together: lookup and fetch hide the estimates, which are therefore no part of such a sample. The
page cache's update runs beside the fetch and the attention; what it adds in spite of that is in the lookup's
time, and its own is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.hardware.clock import Body, graphed, seconds_of
from kvtune.hardware.cost import Features, Offload, stage_features
from kvtune.hardware.machine import Stage
from kvtune.hardware.step_fit import StepSample, fit_steps
from kvtune.hardware.step_settings import GEOMETRY, StepSetting, layers_in_turn
from kvtune.policies.base import Clusters
from kvtune.policies.wave_index import WaveIndex
from kvtune.policies.wave_state import WaveIndexState

if TYPE_CHECKING:
    from kvtune.hardware.wave_steps import WaveSteps
    from kvtune.runtime.fused_layer import LayerStore

StepListener = Callable[[StepSetting, StepSample], None]

_LEAST_CALLS, _LEAST_ROUNDS = 32, 24
"""Steps in a graph, at least; and rounds of the layers with a page cache, which must fill and miss."""

_REPLAYS = 2
_PARTS = ("append", "scan", "choose", "id_copy", "estimate", "lookup", "fetch")


@dataclass(frozen=True)
class RandomIndex(WaveIndex):
    """A wave index of random clusters, as many and about as ragged as those of real keys, made at once."""

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> WaveIndexState:
        heads, n, dim = keys.shape
        clusters, end = self.counts(n).n_centroids, n - self.local
        weights = 0.5 + torch.rand(heads, clusters, dtype=torch.float64, device=keys.device)
        ends = weights.cumsum(1) / weights.sum(1, keepdim=True) * (end - self.sink)
        offsets = torch.nn.functional.pad(ends.round().long(), (1, 0))
        return WaveIndexState(
            layer=layer,
            prompt_length=n,
            context=n,
            clusters=Clusters(
                torch.randn(heads, clusters, dim, device=keys.device).to(keys.dtype),
                offsets.diff(dim=1),
                torch.randn(heads, clusters, values.shape[2], device=keys.device).to(values.dtype),
            ),
            order=torch.arange(self.sink, end, device=keys.device).expand(heads, -1),
            offsets=offsets,
            sink=self.sink,
            prompt_end=end,
            pinned=(),
            tail_start=end,
            tail_keys=keys[:, end:],
            tail_values=values[:, end:],
        )


def measure_steps(
    settings: Iterable[StepSetting],
    device: torch.device,
    repeats: int,
    release: Callable[[], None] = lambda: None,
    listener: StepListener | None = None,
) -> tuple[dict[str, Stage], float]:
    """Stages fitted to all ``settings``, and the largest error of a whole step in the fit.

    After each setting ``listener`` is told what was measured and ``release`` is called. Without settings
    there are no stages.
    """
    samples = []
    for setting in settings:
        samples.append(time_steps(build_steps(setting, device), device, repeats))
        release()
        if listener:
            listener(setting, samples[-1])
    stages, worst = fit_steps(samples)
    if "lookup" in stages:
        stages["update"] = Stage(samples=stages["lookup"].samples)
    return stages, worst


def build_steps(
    setting: StepSetting,
    device: torch.device,
    geometry: ModelGeometry = GEOMETRY,
    fill: Callable[[LayerStore], None] | None = None,
) -> WaveSteps:
    """Layers of ``setting``, started, on noise under random clusters.

    With ``fill``, which writes a layer's keys and values, they are clustered as any, and each layer has host
    memory of its own.
    """
    from kvtune.hardware.wave_steps import Unfilled, WaveSteps
    from kvtune.runtime.fused_layer import LayerStore
    from kvtune.runtime.fused_offload import FusedWaveOffload
    from kvtune.runtime.fused_wave import FusedWave

    info, dtype = geometry.layer(0), getattr(torch, geometry.dtype)
    count = layers_in_turn(setting, device, geometry)
    rounds = max(math.ceil(_LEAST_CALLS / count), 1 if setting.cache is None else _LEAST_ROUNDS)
    policy = setting.policy if fill else RandomIndex(**setting.policy.parameters())
    layers: list[FusedWave] = []
    for _ in range(count):
        if setting.cache is None:
            layer = FusedWave(info, policy, rounds)
        else:
            layer = (FusedWaveOffload if fill else Unfilled)(info, policy, rounds, setting.cache)
        lengths = [setting.context] * setting.batch
        store = LayerStore.empty(info, setting.batch, layer.room(lengths, rounds), dtype, device)
        store.lengths = lengths
        (fill or _noise)(store)
        layer.start(store)
        if isinstance(layer, Unfilled) and layers:
            layer.share_host(layers[0])
        layers.append(layer)
    return WaveSteps(layers, rounds, setting.keep)


def time_steps(steps: WaveSteps, device: torch.device, repeats: int) -> StepSample:
    """Time steps whole and without stages."""
    whole = step_seconds(steps, device, repeats)
    offload: Offload = "cpu" if steps.offloaded else "none"
    features = stage_features(steps.info, steps.traffic(), steps.batch, offload)

    def without(*parts: str) -> float:
        body = steps.partly(set(_PARTS) - set(parts))
        return step_seconds(steps, device, repeats, body)

    if steps.offloaded:
        unfetched = without("fetch")
        bare = without("fetch", "lookup", "estimate")
        counted = {name: one for name, one in features.items() if name not in ("estimate", "update")}
        return StepSample(counted, {"fetch": whole - unfetched, "lookup": unfetched - bare}, whole)
    return StepSample(features, _one_by_one(whole, features, without), whole)


def _one_by_one(
    whole: float, features: Mapping[str, Features], without: Callable[..., float]
) -> dict[str, float]:
    """What a step of ``whole`` seconds loses with each stage in turn; attention is what is left."""
    seconds, gone, before = {}, [], whole
    for name in ("append", "scan", "choose", "id_copy", "estimate"):
        if name in features:
            gone.append(name)
            left = without(*gone)
            seconds[name], before = before - left, left
    return {**seconds, "attend": before}


def step_seconds(steps: WaveSteps, device: torch.device, repeats: int, body: Body | None = None) -> float:
    """Time of one step of ``body`` (default: whole steps) in a CUDA graph of all, the median of ``repeats``.

    Page caches have settled before, and misses are counted from then on.
    """
    body = body or steps.whole
    body = graphed(body, device, warm_up=1, required=True, apart=steps.streams) or body
    for _ in range(2):
        body()
    steps.count_from_now()
    return seconds_of(body, device, repeats, _REPLAYS) / steps.calls


def _noise(store: LayerStore) -> None:
    store.keys.normal_()
    store.values.normal_()
