"""Capture against the same generation without capture; flushing apart; extra peak memory.

Usage: python benchmarks/capture_overhead.py [--model smollm2-135m] [--context 4096] [--decode 64]

Two runs of the same session are timed, turn about: plain (no hook) and recorded (hook, cached keys and values
read out and checked, nothing written). On a CPU with one thread their times are processor time, which other
processes on the machine do not disturb. Flushing writes what a run recorded once more, held against a raw
write of the same bytes (both by the clock). Peak memory is that of processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from record import record, table

from kvtune.capturing import QueryHook, Session, capture
from kvtune.capturing.options import CaptureOptions
from kvtune.capturing.recording import SampleRecorder
from kvtune.models import LoadedModel, attention_through, load_model
from kvtune.traces import TraceWriter
from kvtune.workloads import Sample, Workload, get_workload

_CLEAR = Path("/proc/self/clear_refs")


class Stand:
    """A sample writer that writes nothing: it copies queries as the real one does, and may keep them."""

    index = 0

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._segments = 0
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def segment(self, **what: Any) -> int:
        self._note("segment", **what)
        self._segments += 1
        return self._segments - 1

    def queries(self, layer: int, segment: int, positions: Any, steps: Any, turn: int, queries: Any) -> None:
        copy = queries.to("cpu", copy=True)
        self._note("queries", layer, segment, positions, steps, turn, copy)

    def keys_values(self, *what: Any) -> None:
        self._note("keys_values", *what)

    def record(self, *what: Any) -> None:
        self._note("record", *what)

    def _note(self, call: str, *what: Any, **named: Any) -> None:
        if self._keep:
            self.calls.append((call, what, named))


class One(Workload):
    """One given sample."""

    name, title = "benchmark", "one sample"

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    def samples(self, *_: Any, **__: Any) -> Any:
        yield self._sample


def plain(loaded: LoadedModel, sample: Sample, decode: int) -> None:
    """The generation alone: chunked prefill and greedy decoding, no hook."""
    session = Session(loaded)
    session.feed(sample.context_ids)
    for turn in sample.requests[0].turns:
        session.feed(turn.question_ids)
        list(session.generate(decode))
    _wait(loaded)


def recorded(loaded: LoadedModel, sample: Sample, decode: int, keep: bool = False) -> Stand:
    """Everything a capture does, short of writing."""
    choice = CaptureOptions(decode=decode).choice(loaded.geometry)
    geometry = loaded.geometry
    hook = QueryHook(choice.layers, choice.kv_heads, geometry.n_kv_heads, geometry.group)
    writer: Any = Stand(keep)
    with attention_through(loaded.model, hook):
        SampleRecorder(Session(loaded), hook, writer, choice, One(sample)).run(sample)
    _wait(loaded)
    return writer


def flush(loaded: LoadedModel, stand: Stand, folder: Path) -> None:
    """Write what ``stand`` kept as a trace."""
    geometry = loaded.geometry
    header = {
        "model": loaded.id,
        "fingerprint": loaded.fingerprint,
        "geometry": geometry.to_dict(),
        "dtype": geometry.dtype,
        "layers": list(range(geometry.n_layers)),
        "kv_heads": list(range(geometry.n_kv_heads)),
        "values": True,
    }
    writer = TraceWriter(folder, header, overwrite=folder.exists())
    with writer.sample(0) as sample:
        for call, what, named in stand.calls:
            getattr(sample, call)(*what, **named)
    writer.finish()


def written(loaded: LoadedModel, sample: Sample, decode: int, folder: Path) -> int:
    """A real capture; returns the bytes of the trace."""
    return capture(loaded, One(sample), folder, decode=decode, overwrite=True)["bytes"]


def raw_write(size: int, folder: Path) -> None:
    """``size`` bytes to disk, in pieces of 16 MiB, with fsync."""
    piece = os.urandom(1 << 24)
    with (folder / "raw").open("wb") as file:
        for _ in range(0, size, len(piece)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    (folder / "raw").unlink()


def turn_about(
    bodies: Sequence[Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> list[float]:
    """The shortest time of each body, run in turns so that a busy moment hits them alike."""
    best = [float("inf")] * len(bodies)
    for _ in range(repeats):
        for index, body in enumerate(bodies):
            start = clock()
            body()
            best[index] = min(best[index], clock() - start)
    return best


def make(options: argparse.Namespace) -> tuple[LoadedModel, Sample]:
    loaded = load_model(options.model, device=options.device, dtype=options.dtype)
    (sample,) = get_workload("niah_single").samples(loaded.tokenizer, options.context, 1, 1, 1, 0)
    loaded.model.generation_config.eos_token_id = []
    loaded.tokenizer.eos_token = None  # answers of full length, whatever the model says
    return loaded, sample


def measure_peak(options: argparse.Namespace) -> None:
    """Run one kind of run and print the peak memory in bytes (of the GPU where there is one)."""
    loaded, sample = make(options)
    if _CLEAR.exists():
        _CLEAR.write_text("5")  # forget the peak of loading
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        if options.peak == "plain":
            plain(loaded, sample, options.decode)
        else:
            written(loaded, sample, options.decode, Path(folder) / "t")
    on_gpu = loaded.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else _resident_peak()
    print(json.dumps(peak))


def _resident_peak() -> int:
    """Bytes of this process's peak since it was last forgotten (Linux) or since its start."""
    if _CLEAR.exists():
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_of(kind: str) -> int:
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--peak", kind],
        capture_output=True,
        text=True,
        check=True,
        # glibc keeps freed memory by a threshold that moves; fixed, the peak is what was in use.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", help="where to write (default: the system's temporary folder)")
    parser.add_argument("--peak", choices=("plain", "capture"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        measure_peak(options)
        return
    torch.set_num_threads(1)
    loaded, sample = make(options)
    clock = process_time if loaded.device.type == "cpu" else perf_counter
    folder = Path(tempfile.mkdtemp(dir=options.out))
    try:
        size = written(loaded, sample, options.decode, folder / "t")
        runs = [
            lambda: plain(loaded, sample, options.decode),
            lambda: recorded(loaded, sample, options.decode),
        ]
        times = turn_about(runs, options.repeats, clock)
        stand = recorded(loaded, sample, options.decode, keep=True)
        writes = [lambda: flush(loaded, stand, folder / "t"), lambda: raw_write(size, folder)]
        times += turn_about(writes, 2 * options.repeats, perf_counter)
    finally:
        shutil.rmtree(folder)
    rows = _rows(times, size, loaded, sample, options)
    print(table(rows))
    print(record(rows, f"capture_overhead_{loaded.device.type}"))


def _rows(
    times: list[float], size: int, loaded: LoadedModel, sample: Sample, options: argparse.Namespace
) -> list[dict[str, Any]]:
    plain_s, recorded_s, flush_s, raw_s = times
    geometry = loaded.geometry
    length = len(sample.context_ids) + len(sample.requests[0].turns[0].question_ids) + options.decode
    one_layer = length * geometry.kv_bytes_per_token // geometry.n_layers
    extra = peak_of("capture") - peak_of("plain")
    where = {"model": options.model, "dtype": geometry.dtype, "tokens": length, "decode": options.decode}
    return [
        {
            "name": "capture, flush apart",
            "value": recorded_s,
            "unit": "s",
            "peer": "the same generation",
            "peer_value": plain_s,
            "ratio": recorded_s / plain_s,
            **where,
        },
        {
            "name": "flush",
            "value": flush_s,
            "unit": "s",
            "peer": f"raw write of {size} bytes",
            "peer_value": raw_s,
            "ratio": flush_s / raw_s,
            **where,
        },
        {
            "name": "extra peak memory",
            "value": extra / 2**20,
            "unit": "MiB",
            "peer": "keys and values of one layer",
            "peer_value": one_layer / 2**20,
            "ratio": extra / one_layer,
            **where,
        },
    ]


def _wait(loaded: LoadedModel) -> None:
    if loaded.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
