"""``calibrate``: this machine's bandwidths, latencies and stage constants, measured in a minute or two."""

from __future__ import annotations

import platform
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kvtune import __version__
from kvtune.devices import choose_device, release
from kvtune.errors import InputError, RunError
from kvtune.hardware import device_measures, host_measures
from kvtune.hardware.clock import graphed, seconds_of
from kvtune.hardware.files import parse_hardware
from kvtune.hardware.fit import Sample, fit_stages
from kvtune.hardware.machine import DeviceMemory, Hardware, Launch, Source, Stage
from kvtune.hardware.probes import Probe, stage_probes
from kvtune.hardware.step_probes import StepListener, measure_steps
from kvtune.hardware.step_settings import StepSetting, settings_for
from kvtune.progress import Progress, silent

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_REPLAYS = 4


@dataclass(frozen=True)
class Sizes:
    """How much each measurement moves: bytes, the side of the matrix product, a layer's width, kernels in a
    row, repeats."""

    stream_bytes: int = GIB
    transfers: tuple[int, ...] = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB)
    host_bytes: int = 256 * MIB
    disk_bytes: int = 256 * MIB
    matmul: int = 8192
    width: int = 4096
    kernels: int = 500
    repeats: int = 10


ON_CPU = Sizes(stream_bytes=128 * MIB, host_bytes=128 * MIB, matmul=1024, width=2048, repeats=5)
"""Without a GPU: larger than any processor's cache, and done in seconds."""


def calibrate(
    device: str = "auto",
    *,
    name: str | None = None,
    sizes: Sizes | None = None,
    probes: Iterable[Probe] | None = None,
    settings: Iterable[StepSetting] | None = None,
    estimation: str | None = None,
    folder: str | Path = ".",
    progress: Progress | None = None,
    listener: StepListener | None = None,
) -> Hardware:
    """Measure this machine: the GPU where there is one, else the host's memory as the device.

    ``name`` (default: made of the device's title) is what the description is called. ``probes`` (default:
    :func:`~kvtune.hardware.probes.stage_probes`) are timed and fitted stage by stage, sparse steps of the
    ``settings`` (default: :func:`~kvtune.hardware.step_settings.settings_for`) all together;
    ``estimation`` says where estimates are made (see :func:`~kvtune.hardware.fit.fit_stages`). The disk is
    that of ``folder``. ``listener`` is told of every step measured. A GPU takes a minute or two, most of it
    for compiling kernels.

    Raises ``InputError`` for a device that is not there and an empty name, ``RunError`` where the device has
    no room.
    """
    place = choose_device(device)
    if name is not None and not name.strip():
        raise InputError("the hardware's name must not be empty")
    chosen = sizes or (Sizes() if place.type == "cuda" else ON_CPU)
    with torch.cuda.device(place) if place.type == "cuda" else nullcontext():
        try:
            measures = _measures(place, chosen, probes, settings, Path(folder), listener)
            return _measure(place, name, measures, estimation, progress or silent)
        except torch.OutOfMemoryError:
            raise RunError(
                f"{device_title(place)} has no room for the measurements", "free its memory"
            ) from None


def default_name(device: str = "auto") -> str:
    """What :func:`calibrate` calls a machine: its device's title in small letters and hyphens."""
    return _slug(device_title(choose_device(device)))


def _measures(
    place: torch.device,
    sizes: Sizes,
    probes: Iterable[Probe] | None,
    settings: Iterable[StepSetting] | None,
    folder: Path,
    listener: StepListener | None,
) -> dict[str, Callable[[], Any]]:
    """Every measurement by name, in order."""
    _, free = _memory(place)
    stream, repeats = min(sizes.stream_bytes, free // 8), sizes.repeats

    def steps() -> tuple[dict[str, Stage], float]:
        chosen = settings_for(place) if settings is None else settings
        return measure_steps(chosen, place, repeats, lambda: release(place), listener)

    return {
        "device reads": lambda: device_measures.read_rate(place, stream, repeats),
        "device copies": lambda: device_measures.copy_rate(place, stream, repeats),
        "device gathers": lambda: device_measures.gather_rates(place, stream, repeats),
        "matrix products": lambda: device_measures.matmul_rate(place, sizes.matmul, repeats),
        "launches": lambda: device_measures.kernel_seconds(place, sizes.kernels, repeats),
        "graph nodes": lambda: device_measures.node_seconds(place, sizes.kernels, repeats),
        "a layer's overhead": lambda: device_measures.step_overheads(place, repeats),
        "weights": lambda: device_measures.weights_rate(place, sizes.width, repeats),
        "link to the device": lambda: host_measures.link(place, sizes.transfers, repeats),
        "host memory": lambda: host_measures.host(sizes.host_bytes, repeats),
        "disk": lambda: host_measures.disk(folder, sizes.disk_bytes),
        "stages": lambda: _timed(place, probes, repeats),
        "sparse steps": steps,
    }


def _measure(
    place: torch.device,
    name: str | None,
    measures: dict[str, Callable[[], Any]],
    estimation: str | None,
    progress: Progress,
) -> Hardware:
    found: dict[str, Any] = {}
    with progress.task("calibrating", len(measures)) as step:
        for what, measure in measures.items():
            step.advance(0, note=what)
            found[what] = measure()
            release(place)
            step.advance()
    return _rounded(_described(place, name, estimation, found))


def _described(
    place: torch.device, name: str | None, estimation: str | None, found: dict[str, Any]
) -> Hardware:
    node = found["graph nodes"]
    title = device_title(place)
    fitted, worst = found["sparse steps"]
    note = f"Sparse steps: the fit's largest error of a whole step is {worst:.1%}." if fitted else None
    return Hardware(
        name=name or _slug(title),
        device=title,
        source=Source(
            kind="measured", date=f"{datetime.now(UTC):%Y-%m-%d}", versions=_versions(place), note=note
        ),
        device_memory=DeviceMemory(
            bytes=_memory(place)[0],
            read_bytes_per_second=found["device reads"],
            copy_bytes_per_second=found["device copies"],
            weights_bytes_per_second=found["weights"],
            gather=found["device gathers"],
        ),
        host_to_device=found["link to the device"],
        host=found["host memory"],
        disk=found["disk"],
        launch=Launch(
            kernel_us=found["launches"] * 1e6,
            graph_node_us=None if node is None else node * 1e6,
            layer_overhead_us=found["a layer's overhead"][0] * 1e6,
            step_overhead_us=found["a layer's overhead"][1] * 1e6,
        ),
        matmul_flops_per_second=found["matrix products"],
        stages=fit_stages(found["stages"], estimation, fitted),
    )


def _timed(place: torch.device, probes: Iterable[Probe] | None, repeats: int) -> dict[str, list[Sample]]:
    """Every probe timed, by stage; a probe is let go before the next one is made."""
    samples: dict[str, list[Sample]] = defaultdict(list)
    for probe in stage_probes(place) if probes is None else probes:
        samples[probe.stage].append(time_probe(probe, place, repeats))
    return samples


def time_probe(probe: Probe, device: torch.device, repeats: int = 10) -> Sample:
    """Time of one call of the probe's stage: the median of ``repeats`` replays."""
    replay = graphed(probe.run, device)
    if replay is None:
        return Sample(probe.features, seconds_of(probe.run, device, repeats) / probe.calls)
    return Sample(probe.features, seconds_of(replay, device, repeats, _REPLAYS) / probe.calls)


def _rounded(hardware: Hardware) -> Hardware:
    """The same with reals of four digits: more were not measured."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(item) for key, item in value.items()}
        if isinstance(value, list):
            return [short(item) for item in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return parse_hardware(short(hardware.model_dump(mode="json")))


def _memory(place: torch.device) -> tuple[int, int]:
    """Bytes of the device's memory, and those free."""
    if place.type == "cuda":
        free, total = torch.cuda.mem_get_info(place)
        return total, free
    total = host_measures.memory_bytes() or 8 * GIB
    return total, total


def device_title(place: torch.device) -> str:
    """What a description of ``place`` calls it: the GPU's name, or the processor's."""
    if place.type == "cuda":
        return torch.cuda.get_device_name(place)
    return f"{_processor()} (host memory)"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next((name for name in named if name), platform.processor() or platform.machine())


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "machine"


def _versions(place: torch.device) -> dict[str, str]:
    found = {"kvtune": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if place.type == "cuda" and torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found
