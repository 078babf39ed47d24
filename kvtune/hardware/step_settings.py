"""Settings of a sparse decode step, an 8B model's layer, that ``calibrate`` times and fits stages to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from kvtune.geometry import ModelGeometry
from kvtune.hardware.host_measures import memory_bytes
from kvtune.hardware.traffic import wave_traffic
from kvtune.policies.wave_index import WaveIndex

GEOMETRY = ModelGeometry(
    n_layers=1, n_heads=32, n_kv_heads=8, head_dim=128, value_dim=128, dtype="bfloat16",
    max_positions=131072, scaling=128**-0.5, windows=(None,), softcaps=(None,), sinks=(False,),
)  # fmt: skip
"""One layer of an 8B model's shape."""

_CACHES_FULL = 2.5
"""What the layers that take turns read together, in sizes of the device's own cache."""

_MOST_LAYERS = 48


@dataclass(frozen=True)
class StepSetting:
    """One step: so many sequences of a context, zones as shares of the clusters.

    ``cache``: the page cache's share of the context, where clusters lie in host memory; ``keep``: how much a
    query resembles that of the step before (see :class:`~kvtune.hardware.wave_steps.WaveSteps`).
    """

    batch: int
    context: int
    retrieval: float = 0.018
    estimation: float = 0.232
    tokens_per_centroid: int = 16
    cache: float | None = None
    keep: float = 0.0

    @property
    def policy(self) -> WaveIndex:
        return WaveIndex(self.retrieval, self.estimation, self.tokens_per_centroid)

    def kv_bytes(self, geometry: ModelGeometry = GEOMETRY) -> int:
        """Keys and values of all sequences in all layers of ``geometry``."""
        return self.batch * self.context * geometry.kv_bytes_per_token


ON_DEVICE = (
    StepSetting(1, 8192),
    StepSetting(1, 32768, 0.05, 0.1),
    StepSetting(1, 32768, 0.02, 0.4),
    StepSetting(1, 65536, 0.01, 0.0, 32),
    StepSetting(1, 131072),
    StepSetting(1, 131072, 0.05, 0.25, 8),
    StepSetting(4, 8192, 0.1, 0.0),
    StepSetting(4, 16384, 0.01, 0.1, 32),
    StepSetting(4, 32768),
    StepSetting(4, 65536, 0.05, 0.25, 8),
    StepSetting(4, 131072),
    StepSetting(4, 131072, 0.03, 0.4),
    StepSetting(8, 8192),
    StepSetting(8, 32768, 0.05, 0.0),
    StepSetting(8, 65536),
    StepSetting(8, 65536, 0.02, 0.4, 8),
    StepSetting(8, 131072),
    StepSetting(8, 131072, 0.05, 0.1),
    StepSetting(16, 8192),
    StepSetting(16, 16384, 0.1, 0.25),
    StepSetting(16, 32768, 0.018, 0.4, 32),
    StepSetting(16, 65536, 0.03, 0.1),
    StepSetting(16, 131072),
    StepSetting(16, 131072, 0.05, 0.0),
)
"""8 to 128 kv heads, 8K to 131K tokens, 1 to 10% retrieved, none to 40% estimated."""

OFFLOADED = (
    StepSetting(1, 32768, cache=0.05, keep=0.9),
    StepSetting(1, 131072, cache=0.02, keep=0.5),
    StepSetting(1, 131072, 0.05, 0.1, cache=0.1, keep=0.99),
    StepSetting(4, 32768, cache=0.1, keep=0.97),
    StepSetting(4, 65536, 0.03, cache=0.05, keep=0.9),
    StepSetting(8, 32768, cache=0.05, keep=0.995),
    StepSetting(8, 32768, 0.05, cache=0.05, keep=0.5),
)
"""With a page cache, from most pages missed to few."""


def settings_for(device: torch.device) -> Iterator[StepSetting]:
    """The settings that ``device`` and the host have room for; none without CUDA or Triton."""
    if device.type != "cuda" or find_spec("triton") is None:
        return
    room = torch.cuda.mem_get_info(device)[0] // 2
    host = (memory_bytes() or 0) // 4 if _can_pin() else 0
    for setting in (*ON_DEVICE, *OFFLOADED):
        fits = setting.kv_bytes() * layers_in_turn(setting, device) <= room
        if fits and (setting.cache is None or 4 * setting.kv_bytes() <= host):
            yield setting


def layers_in_turn(setting: StepSetting, device: torch.device, geometry: ModelGeometry = GEOMETRY) -> int:
    """How many layers take turns, so that the device's cache holds nothing of one when its turn comes."""
    if device.type != "cuda":
        return 1
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
    step = wave_traffic(geometry, setting.context, setting.policy)[0]
    read = setting.batch * (step.scan_bytes + step.estimation_bytes + step.attended)
    return min(max(math.ceil(_CACHES_FULL * cache / read), 1), _MOST_LAYERS)


def _can_pin() -> bool:
    try:
        torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return False
    return True
