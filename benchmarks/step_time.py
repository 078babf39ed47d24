"""Predicted time of one layer's decode step against the live one, at settings that no fit has seen.

The shape is an 8B model's: 32 query and 8 kv heads of dimension 128, bf16. Live is the fused wave index,
its clusters made of random keys around a few hundred directions, in one CUDA graph of many steps. Layers of
the same setting take turns, so that none finds its data in the GPU's own cache, as in a model. Predicted is
the cost model's layer, with the machine calibrated in the same run (or read from a file) and the traffic
counted from what the live layers chose; beside it, from the counts of the policy alone. With a page cache,
clusters lie in pinned host memory and the misses are those of the run.

Run from the repository root: ``PYTHONPATH=. python benchmarks/step_time.py --save h200.yaml``.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, Self, get_args

import record as recording
import torch

from kvtune.hardware import (
    Hardware,
    LayerCost,
    LayerTraffic,
    StepSample,
    calibrate,
    layer_cost,
    read_hardware,
    save_hardware,
    wave_traffic,
)
from kvtune.hardware.cost import Offload
from kvtune.hardware.machine import StageName
from kvtune.hardware.step_probes import build_steps, step_seconds, time_steps
from kvtune.hardware.step_settings import GEOMETRY, OFFLOADED, ON_DEVICE, StepSetting
from kvtune.runtime.fused_layer import LayerStore

DEVICE = torch.device("cuda")
REPEATS = 15
KEPT = (
    StepSetting(1, 12000, 0.02, 0.2),
    StepSetting(1, 24000, 0.05, 0.3),
    StepSetting(1, 48000),
    StepSetting(1, 100000, 0.01, 0.4),
    StepSetting(1, 131072, 0.03, 0.1),
    StepSetting(2, 12000),
    StepSetting(2, 24000, 0.03, 0.0),
    StepSetting(2, 48000, 0.05, 0.1, 8),
    StepSetting(2, 100000, 0.03, 0.2, 8),
    StepSetting(2, 131072, 0.02, 0.3),
    StepSetting(6, 12000, 0.05, 0.2),
    StepSetting(6, 24000, 0.018, 0.232, 8),
    StepSetting(6, 48000, 0.02, 0.4),
    StepSetting(6, 100000),
    StepSetting(12, 12000, 0.018, 0.3),
    StepSetting(12, 24000, 0.03, 0.1, 32),
    StepSetting(12, 48000),
    StepSetting(12, 131072, 0.018, 0.15),
    StepSetting(16, 24000, 0.02),
    StepSetting(16, 48000, 0.05, 0.05),
    StepSetting(16, 100000, 0.01, 0.2, 32),
    StepSetting(16, 131072, 0.03, 0.3),
)
CACHED = (
    StepSetting(1, 48000, cache=0.05, keep=0.95),
    StepSetting(1, 100000, 0.03, 0.2, cache=0.03, keep=0.8),
    StepSetting(2, 48000, cache=0.1, keep=0.98),
    StepSetting(2, 24000, 0.05, 0.1, 8, cache=0.05, keep=0.9),
    StepSetting(6, 24000, cache=0.05, keep=0.9),
    StepSetting(6, 48000, 0.02, 0.2, cache=0.1, keep=0.99),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--calibration", type=Path, help="a hardware YAML to predict with, instead of measuring"
    )
    parser.add_argument("--save", type=Path, help="write the calibrated machine here, named by the file")
    parser.add_argument(
        "--stages", action="store_true", help="time what a live step loses without each stage"
    )
    parser.add_argument("--no-offload", action="store_true", help="leave the page cache out")
    parser.add_argument(
        "--short", action="store_true", help="fit half of the settings on the device, compare 14 others"
    )
    options = parser.parse_args()
    settings = (KEPT[::2] + KEPT[5::6] if options.short else KEPT) + (() if options.no_offload else CACHED)
    fitted_to = (ON_DEVICE[::2] if options.short else ON_DEVICE) + (() if options.no_offload else OFFLOADED)
    assert not set(settings) & {*ON_DEVICE, *OFFLOADED}, "a setting must not be one that was fitted"
    if out := os.environ.get("OUT"):
        recording.RESULTS = Path(out)
    fitted = Fitted()
    if options.calibration:
        hardware = read_hardware(options.calibration)
    else:
        name = options.save.stem if options.save else None
        hardware = calibrate(
            "cuda",
            name=name,
            progress=Told(),
            listener=fitted.append_step,
            settings=fitted_to,
        )
    if options.save:
        save_hardware(hardware, options.save, overwrite=True)
    show_stages(hardware)
    torch.manual_seed(0)
    fits, rows = fitted.rows(hardware), []
    for setting in settings:
        rows.append(compared(setting, hardware, options.stages))
        gc.collect()
        torch.cuda.empty_cache()
        path = recording.record([*summary(rows), *rows, *fits], "step_time")
    print(recording.table(summary(rows)))
    print(f"wrote {path}")


def compared(setting: StepSetting, hardware: Hardware, by_stage: bool) -> dict[str, Any]:
    """One setting, live and predicted."""
    started = perf_counter()
    steps = build_steps(setting, DEVICE, GEOMETRY, clustered)
    live = step_seconds(steps, DEVICE, REPEATS)
    traffic, hits = steps.traffic(), 1 - steps.missed_shares()[0]
    predicted = predict(hardware, setting, traffic)
    planned = wave_traffic(GEOMETRY, setting.context, setting.policy, hit_ratio=hits)[0]
    terms = {name: 1e6 * term.seconds for name, term in predicted.terms.items() if name != "fixed"}
    row = {
        "name": f"step_time {label(setting)}", "value": 1e6 * predicted.attention_seconds, "unit": "us",
        "peer": "live", "peer_value": 1e6 * live, "ratio": predicted.attention_seconds / live,
        "error_percent": percent(predicted.attention_seconds, live),
        "planned_us": 1e6 * predict(hardware, setting, planned).attention_seconds,
        "offload": "none" if setting.cache is None else "cpu",
        "hit_ratio": None if setting.cache is None else hits,
        "terms_us": terms, "traffic": asdict(traffic), **asdict(setting), "layers": len(steps.layers),
    }  # fmt: skip
    if by_stage:
        sample = time_steps(steps, DEVICE, REPEATS)
        row["live_terms_us"] = {name: 1e6 * seconds for name, seconds in sample.seconds.items()}
    show(row, perf_counter() - started)
    return row


def predict(hardware: Hardware, setting: StepSetting, traffic: LayerTraffic) -> LayerCost:
    place: Offload = "none" if setting.cache is None else "cpu"
    return layer_cost(hardware, GEOMETRY.layer(0), traffic, batch=setting.batch, offload=place)


def clustered(store: LayerStore) -> None:
    """Fill a store with random keys around a few hundred directions, others for every layer."""
    for unit in range(len(store.keys)):
        n, device = store.lengths[0], store.keys.device
        directions = torch.randn(256, store.keys.shape[2], device=device)
        noise = torch.randn(n, store.keys.shape[2], device=device)
        store.keys[unit, :n] = directions[torch.randint(256, (n,), device=device)] + noise
        store.values[unit, :n] = torch.randn(n, store.values.shape[2], device=device)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The largest error: of all settings, and of those with and without a page cache."""
    found = []
    for what, mine in (
        ("", rows),
        (" kept on the device", [row for row in rows if row["cache"] is None]),
        (" with a page cache", [row for row in rows if row["cache"] is not None]),
    ):
        if mine:
            errors = [abs(row["error_percent"]) for row in mine]
            planned = [abs(percent(row["planned_us"], row["peer_value"])) for row in mine]
            found.append(
                {"name": f"step_time_prediction{what}", "value": max(errors), "unit": "%", "peer": "live",
                 "peer_value": None, "ratio": None, "mean_percent": statistics.mean(errors),
                 "planned_worst_percent": max(planned), "settings": len(mine)}
            )  # fmt: skip
    return found


def label(setting: StepSetting) -> str:
    zones = f"r={setting.retrieval:g} e={setting.estimation:g} t={setting.tokens_per_centroid}"
    cache = "" if setting.cache is None else f" cache={setting.cache:g}"
    return f"{setting.batch} x {setting.context} {zones}{cache}"


def percent(value: float, right: float) -> float:
    return 100 * (value / right - 1)


def show(row: dict[str, Any], took: float) -> None:
    live = row.get("live_terms_us", {})
    terms = ", ".join(
        f"{name} {value:.1f}" + (f" ({live[name]:.1f})" if name in live else "")
        for name, value in row["terms_us"].items()
    )
    hits = "" if row["hit_ratio"] is None else f"  hits {row['hit_ratio']:.0%}"
    print(
        f"{row['name'][10:]:48s} live {row['peer_value']:7.1f}  predicted {row['value']:7.1f} us "
        f"{row['error_percent']:+6.1f}%  planned {percent(row['planned_us'], row['peer_value']):+6.1f}%"
        f"{hits}  [{terms}]  {took:.1f} s",
        flush=True,
    )


def show_stages(hardware: Hardware) -> None:
    print(f"{hardware.name}: {hardware.device}. {hardware.source.note or ''}")
    for name in get_args(StageName):
        if stage := hardware.stages.get(name):
            rate = f"{stage.bytes_per_second / 1e12:.3f} TB/s" if stage.bytes_per_second else "-"
            error = "" if stage.worst_error is None else f", worst {stage.worst_error:.1%}"
            print(
                f"  {name:9s} {stage.fixed_us:6.2f} us + bytes at {rate} + {stage.ns_per_entry:.4g} ns an "
                f"entry ({stage.samples} samples{error})"
            )


class Fitted:
    """The steps that calibration fitted to: what they took, stage by stage, and what the fit says."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepSetting, StepSample]] = []

    def append_step(self, setting: StepSetting, sample: StepSample) -> None:
        parts = ", ".join(f"{name} {1e6 * seconds:.1f}" for name, seconds in sample.seconds.items())
        print(f"    {label(setting):48s} {1e6 * sample.whole:7.1f} us  [{parts}]", flush=True)
        self.steps.append((setting, sample))

    def rows(self, hardware: Hardware) -> list[dict[str, Any]]:
        found = []
        for setting, sample in self.steps:
            terms = {}
            for name, features in sample.features.items():
                stage = hardware.stages.get(name)
                terms[name] = 1e6 * stage.seconds(features.bytes, features.entries) if stage else 0.0
            fit, whole = sum(terms.values()), 1e6 * sample.whole
            found.append(
                {"name": f"fitted_step {label(setting)}", "value": fit, "unit": "us", "peer": "live",
                 "peer_value": whole, "ratio": fit / whole, "error_percent": percent(fit, whole),
                 "terms_us": terms, "live_terms_us": {k: 1e6 * v for k, v in sample.seconds.items()},
                 "features": {name: asdict(one) for name, one in sample.features.items()}, **asdict(setting)}
            )  # fmt: skip
        return found


class Told:
    """Progress that prints how long each measurement took."""

    def task(self, label: str, total: int | None) -> Self:
        self.note, self.since = "", perf_counter()
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def advance(self, n: int = 1, note: str = "") -> None:
        if note:
            self.note, self.since = note, perf_counter()
        elif n:
            print(f"  calibrating {self.note}: {perf_counter() - self.since:.1f} s", flush=True)


if __name__ == "__main__":
    main()
