"""Calibration on a CPU with small sizes: every field is there, and a prediction can be made of it."""

from __future__ import annotations

import sys
from datetime import date

import pytest
import torch
from machines import GEOMETRY, TRAFFIC

import kvtune
from kvtune.errors import InputError
from kvtune.hardware import (
    Features,
    Probe,
    Sizes,
    Stage,
    Stages,
    parse_hardware,
    settings_for,
    step_cost,
    to_yaml,
)
from kvtune.hardware.clock import graphed, seconds_of
from kvtune.hardware.fit import fit_stages
from kvtune.hardware.host_measures import disk
from kvtune.hardware.probes import stage_probes

CPU = torch.device("cpu")
SMALL = Sizes(
    stream_bytes=1 << 20, transfers=(4096,), host_bytes=1 << 20, disk_bytes=1 << 20, matmul=64, width=64,
    kernels=20, repeats=2,
)  # fmt: skip


class Listener:
    """Progress that notes what it is told."""

    def __init__(self) -> None:
        self.done, self.total, self.notes = 0, 0, []

    def task(self, label, total):
        self.total = total
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def advance(self, n=1, note=""):
        self.done += n
        self.notes.append(note)


def test_a_machine_without_a_gpu(tmp_path):
    listener = Listener()
    hardware = kvtune.calibrate("cpu", sizes=SMALL, folder=tmp_path, progress=listener)
    assert hardware.source.kind == "measured"
    assert date.fromisoformat(hardware.source.date or "") <= date.today()
    assert {"kvtune", "torch", "python"} <= set(hardware.source.versions)
    assert hardware.device.endswith("(host memory)") and hardware.name
    assert hardware.host_to_device is None and hardware.launch.graph_node_us is None
    assert [rate.row_bytes for rate in hardware.device_memory.gather] == [256, 2048]
    assert hardware.device_memory.bytes == hardware.host.memory_bytes
    launch, memory = hardware.launch, hardware.device_memory
    assert min(launch.kernel_us, launch.layer_overhead_us, memory.weights_bytes_per_second) > 0
    assert launch.step_overhead_us >= 0
    assert hardware.disk is not None and not list(tmp_path.iterdir())
    assert hardware.stages == fit_stages({})
    assert listener.done == listener.total > 5 and "disk" in listener.notes
    rate = hardware.matmul_flops_per_second
    assert rate == float(f"{rate:.4g}") > 0
    assert step_cost(hardware, GEOMETRY, TRAFFIC, offload="none").seconds > 0
    assert to_yaml(parse_hardware(hardware.model_dump(mode="json"))) == to_yaml(hardware)


def test_probes_are_timed_and_fitted(tmp_path):
    called = []

    def probe(size: int, calls: int) -> Probe:
        tensor = torch.ones(size)

        def run() -> None:
            called.append(size)
            for _ in range(calls):
                tensor.add_(1)

        return Probe("scan", run, Features(4.0 * size), calls)

    hardware = kvtune.calibrate(
        "cpu", name="mine", sizes=SMALL, folder=tmp_path,
        probes=(probe(size, calls) for size, calls in [(1000, 4), (100_000, 2), (1_000_000, 1)]),
    )  # fmt: skip
    assert hardware.name == "mine"
    assert hardware.stages.scan is not None and hardware.stages.scan.samples == 3
    assert hardware.stages.attend is None and hardware.stages.estimation == "beside_fetch"
    assert sorted(set(called)) == [1000, 100_000, 1_000_000]
    assert called.count(1000) == 1 + SMALL.repeats


def test_steps_are_fitted_together_and_their_error_is_noted(tmp_path, monkeypatch):
    fitted = {"attend": Stage(fixed_us=2.0, samples=3), "estimate": Stage(fixed_us=1.0)}
    given = []

    def measured(settings, device, repeats, release, listener):
        given.extend([*settings, device, repeats, listener])
        return fitted, 0.0432

    monkeypatch.setattr(sys.modules["kvtune.hardware.calibrate"], "measure_steps", measured)
    hardware = kvtune.calibrate("cpu", sizes=SMALL, folder=tmp_path, settings=["one"], listener=print)
    assert given == ["one", CPU, SMALL.repeats, print]
    assert hardware.stages == Stages(**fitted) and hardware.stages.estimation == "beside_fetch"
    assert "4.3%" in (hardware.source.note or "")


def test_a_gpu_alone_has_stage_probes_settings_and_graphs():
    assert list(stage_probes(CPU)) == [] and list(settings_for(CPU)) == []
    assert graphed(lambda: None, CPU) is None and graphed(lambda: None, CPU, required=True) is None


def test_the_median_is_taken(monkeypatch):
    ticks = iter([0.0, 5.0, 10.0, 11.0, 20.0, 23.0])
    monkeypatch.setattr("kvtune.hardware.clock.perf_counter", lambda: next(ticks))
    assert seconds_of(lambda: None, CPU, 3) == 3.0


def test_several_calls_between_readings(monkeypatch):
    called, ticks = [], iter([0.0, 6.0])
    monkeypatch.setattr("kvtune.hardware.clock.perf_counter", lambda: next(ticks))
    assert seconds_of(lambda: called.append(1), CPU, 1, calls=3) == 2.0
    assert len(called) == 6


def test_a_disk_that_cannot_be_written(tmp_path):
    assert disk(tmp_path / "nowhere", 1 << 10) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [({"device": "tpu9"}, "device 'tpu9' is not available"), ({"name": " "}, "name must not be empty")],
)
def test_bad_input(options, message):
    with pytest.raises(InputError, match=message):
        kvtune.calibrate(**{"device": "cpu", "sizes": SMALL, **options})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu(tmp_path):
    sizes = Sizes(stream_bytes=64 << 20, transfers=(4096, 1 << 20), matmul=1024, kernels=50, repeats=3)
    few = [one for one in settings_for(torch.device("cuda")) if one.batch == 1 and one.context <= 32768]
    hardware = kvtune.calibrate("cuda", sizes=sizes, folder=tmp_path, settings=few)
    assert hardware.host_to_device is not None and hardware.launch.graph_node_us is not None
    assert hardware.stages.full is not None and hardware.stages.full.bytes_per_second is not None
    for name in ("scan", "choose", "id_copy", "estimate", "attend", "append", "lookup", "fetch", "update"):
        assert hardware.stages.get(name) is not None, name
    assert hardware.host_to_device.pageable
