"""The decode step of a live run as the cost model sees it: its own accesses, on a machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from kvtune.caching import Tally
from kvtune.caching.tally import COLD, PAGE, REQUEST, TOKEN
from kvtune.errors import InputError
from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.hardware.calibrate import device_title
from kvtune.hardware.cost import StepCost, step_cost
from kvtune.hardware.machine import Hardware
from kvtune.hardware.traffic import LayerTraffic, Traffic, dense_traffic
from kvtune.models import LoadedModel
from kvtune.policies.full import Full
from kvtune.policies.plan import Plan
from kvtune.runtime.layer_reads import LayerReads
from kvtune.runtime.measurements import LiveRun

_SAME_MEMORY = 0.15
"""Bytes of one device by a data sheet and by its driver differ by less than this share."""


@dataclass(frozen=True)
class StepPredictor:
    """The ``predict`` of :func:`kvtune.live`: a step by the fused kernels on ``hardware``."""

    hardware: Hardware
    loaded: LoadedModel

    def __call__(self, run: LiveRun, plan: Plan, batch: int = 1) -> StepCost:
        """The step of ``batch`` sequences, each like the run's mean.

        Raises ``InputError`` where the run or the machine does not say enough.
        """
        return step_cost(
            self.hardware,
            self.loaded.geometry,
            live_traffic(run, plan, self.loaded.geometry),
            batch=batch,
            weights_bytes=weights_read(self.loaded),
            offload=run.engine["offload"],
        )

    def describe(self) -> dict[str, Any]:
        """JSON-ready: the machine, where its numbers come from, and whether it is the one measured on."""
        hardware, device = self.hardware, self.loaded.device
        return {
            "name": hardware.name,
            "device": hardware.device,
            "source": hardware.source.model_dump(mode="json", exclude_none=True),
            "measured_on": device_title(device),
            "same_machine": describes(hardware, device),
        }


def describes(hardware: Hardware, device: torch.device) -> bool:
    """Whether ``hardware`` stands for ``device``: by its title, or a GPU's model and memory."""
    title = device_title(device)
    if title == hardware.device:
        return True
    if device.type != "cuda" or _model(title) != _model(hardware.device):
        return False
    memory = torch.cuda.get_device_properties(device).total_memory
    return abs(memory / hardware.device_memory.bytes - 1) < _SAME_MEMORY


def _model(title: str) -> str | None:
    """The part of a GPU's title that names its model: ``H100`` of ``NVIDIA H100 80GB HBM3``."""
    return next(iter(re.findall(r"[A-Z]*\d+[A-Z]*", title.upper())), None)


def weights_read(loaded: LoadedModel) -> int:
    """Bytes of weights that a step reads: all, but of an input embedding of its own only a row."""
    model: Any = loaded.model
    total = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    table, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = output is not None and output.weight is table
    return int(total) if tied else int(total - table.numel() * table.element_size())


def live_traffic(run: LiveRun, plan: Plan, geometry: ModelGeometry) -> Traffic:
    """Mean traffic of the forced decode steps, layer by layer.

    What is looked up and missed is what the live caches counted; index and resident tokens are those of the
    plan's selections on the same tokens; dense layers read the visible ones. Raises ``InputError`` for a run
    without a forecast.
    """
    return tuple(_traffic(run, plan, geometry.layer(number)) for number in range(geometry.n_layers))


def _traffic(run: LiveRun, plan: Plan, layer: LayerInfo) -> LayerTraffic:
    if isinstance(plan.for_layer(layer), Full):
        return dense_traffic(layer, run.visible_tokens)
    if layer.layer not in run.reads:
        raise InputError("what the layers read was not counted: the run had no forecast")
    reads = run.reads[layer.layer]
    asked, lacking = _asked(reads, run.forced.layers.get(layer.layer), run.forced.steps)
    resident = reads.resident_tokens / reads.steps
    return LayerTraffic(
        scan_bytes=reads.scan_bytes / reads.steps,
        estimation_bytes=reads.estimation_bytes / reads.steps,
        exact_bytes=(reads.resident_pages / reads.steps + asked[PAGE]) * layer.page_bytes,
        missed_bytes=lacking[PAGE] * layer.page_bytes,
        blocks=asked[REQUEST],
        attended_bytes=(resident + asked[TOKEN]) * layer.token_bytes,
        fetched_bytes=lacking[TOKEN] * layer.token_bytes,
    )


def _asked(reads: LayerReads, live: Tally | None, steps: int) -> tuple[list[float], list[float]]:
    """Blocks, pages and tokens that a step asks of the caches, and those that they lack.

    A layer without a log of its own asks for what the plan selects, and lacks nothing.
    """
    if live is None:
        return [count / reads.steps for count in (reads.blocks, reads.pages, reads.tokens)], [0.0] * 3
    asked, hits = live.accesses[COLD], live.hits[0, COLD]
    return (asked / steps).tolist(), ((asked - hits) / steps).tolist()
