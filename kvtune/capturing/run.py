"""``capture``: a model on a workload, as a trace."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from kvtune.capturing.hook import QueryHook
from kvtune.capturing.loop import CHUNK, Session
from kvtune.capturing.options import CaptureOptions
from kvtune.capturing.plan import CapturePlan, check_fit, plan_capture, samples_digest
from kvtune.capturing.projections import output_projection
from kvtune.capturing.recording import Choice, SampleRecorder
from kvtune.errors import InputError
from kvtune.models import LoadedModel, ModelFiles, Rope, attention_through, load_model, open_model
from kvtune.progress import Progress, Step, silent
from kvtune.traces import TraceWriter, open_trace
from kvtune.workloads import PromptFile, Sample, Workload, get_workload

Announce = Callable[[CapturePlan], None]


@dataclass(frozen=True)
class _Job:
    """Everything that decides a trace's content."""

    loaded: LoadedModel
    workload: Workload
    samples: Sequence[Sample]
    choice: Choice
    plan: CapturePlan
    header: dict[str, Any]


def capture(
    model: str | ModelFiles | LoadedModel,
    workload: str | Path | Workload,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    announce: Announce | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Run ``model`` over ``workload`` and write its queries, keys, values and answers to the folder ``out``.

    ``model`` is a name, an opened or a loaded model (then its device, dtype and rope count); ``workload`` a
    task's name, the ``Path`` of a prompt file, or a ``Workload``; ``options`` are those of
    :class:`CaptureOptions`. ``announce`` is called with the plan before the first sample. A capture that was
    killed continues with ``resume`` and gives the same bytes as one that was not.

    Returns ``trace, samples, requests, units, tokens, decode_steps, seconds, bytes, score{task}`` of the
    whole trace (``seconds`` of this call, loading apart; a task's score is ``None`` without references).
    Raises ``InputError``, before anything is written, for what cannot be captured; ``TraceError`` where the
    model makes a NaN; ``RunError`` where the disk fails.
    """
    settings = CaptureOptions(**options)
    listener = progress or silent
    job = _prepare(model, _workload(workload), settings, listener)
    _check_disk(Path(out), job.plan)
    writer = TraceWriter(out, job.header, resume=resume, overwrite=overwrite)
    if announce is not None:
        announce(job.plan)
    started = time.perf_counter()
    if settings.o_proj:
        for layer in job.choice.layers:
            writer.o_proj(layer, output_projection(job.loaded.model, layer))
    _run(job, writer, listener)
    writer.finish()
    return _summary(Path(out), job, time.perf_counter() - started)


def _workload(given: str | Path | Workload) -> Workload:
    if isinstance(given, Workload):
        return given
    return PromptFile(given) if isinstance(given, Path) else get_workload(given)


def _prepare(
    model: str | ModelFiles | LoadedModel, workload: Workload, settings: CaptureOptions, progress: Progress
) -> _Job:
    """Make the samples, refuse what cannot be, and only then read the weights."""
    opened = open_model(model, progress) if isinstance(model, str) else model
    count, turns = settings.counts(workload)
    samples = list(
        workload.samples(opened.tokenizer, settings.context, count, turns, settings.requests, settings.seed)
    )
    if isinstance(opened, ModelFiles):
        promised = opened.geometry("float32")
        longest = plan_capture(samples, promised, settings.choice(promised)).longest
        rope = Rope(settings.rope, longest)
        _refuse(samples, settings, opened.geometry("float32", rope))
        loaded = load_model(opened, settings.device, settings.dtype, rope)
    else:
        loaded = opened
    plan, choice = _refuse(samples, settings, loaded.geometry)
    return _Job(loaded, workload, samples, choice, plan, _header(loaded, workload, samples, choice, settings))


def _refuse(samples: Sequence[Sample], settings: CaptureOptions, geometry: Any) -> tuple[CapturePlan, Choice]:
    choice = settings.choice(geometry)
    plan = plan_capture(samples, geometry, choice)
    check_fit(plan, samples, choice, geometry.max_positions)
    return plan, choice


def _header(
    loaded: LoadedModel,
    workload: Workload,
    samples: Sequence[Sample],
    choice: Choice,
    settings: CaptureOptions,
) -> dict[str, Any]:
    """The trace's provenance: whatever could change a byte of it."""
    _, turns = settings.counts(workload)
    return {
        "model": loaded.id,
        "fingerprint": loaded.fingerprint,
        "geometry": loaded.geometry.to_dict(),
        "rope": asdict(loaded.rope),
        "template_hash": loaded.template_hash,
        "dtype": loaded.geometry.dtype,
        "layers": list(choice.layers),
        "kv_heads": list(choice.kv_heads),
        "values": choice.values,
        "o_proj": settings.o_proj,
        "seed": settings.seed,
        "workload": {
            "name": workload.name,
            "context": settings.context,
            "samples": len(samples),
            "requests": settings.requests,
            "turns": turns,
            "digest": samples_digest(samples),
        },
        "settings": {
            "prompt_queries": choice.prompt_queries,
            "decode": choice.decode,
            "force": choice.force,
            "keep_answers": choice.keep_answers,
            "chunk": CHUNK,
        },
        "software": {
            "device": loaded.device.type,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _check_disk(out: Path, plan: CapturePlan) -> None:
    """Refuse a trace for which there is no room; what lies at ``out`` is continued or replaced."""
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    needed = plan.bytes - (_folder_bytes(out) if out.is_dir() else 0)
    if needed > free:
        raise InputError(
            f"the trace needs about {needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB are free "
            f"for '{out}'",
            "keep less with --layers, --kv-heads, --no-values or --prompt-queries, or fewer --samples",
        )


def _run(job: _Job, writer: TraceWriter, progress: Progress) -> None:
    geometry, choice = job.loaded.geometry, job.choice
    hook = QueryHook(choice.layers, choice.kv_heads, geometry.n_kv_heads, geometry.group)
    todo = [index for index in range(len(job.samples)) if index not in writer.completed]
    total = sum(job.plan.sample_tokens[index] for index in todo)
    with progress.task("capturing", total) as step, attention_through(job.loaded.model, hook):
        meter = _Meter(step)
        for index in todo:
            with writer.sample(index) as sample, meter.of(job.plan.sample_tokens[index]):
                session = Session(job.loaded, meter.advance)
                SampleRecorder(session, hook, sample, choice, job.workload).run(job.samples[index])


class _Meter:
    """Tells progress how many tokens went through the model, and how fast."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._done = self._sample = 0
        self._started = time.perf_counter()

    def advance(self, tokens: int) -> None:
        self._done += tokens
        self._sample += tokens
        rate = self._done / max(time.perf_counter() - self._started, 1e-9)
        self._step.advance(tokens, note=f"{rate:,.0f} tokens/s")

    @contextmanager
    def of(self, planned: int) -> Any:
        """One sample of at most ``planned`` tokens; answers that ended early count as done."""
        self._sample = 0
        yield
        self._step.advance(max(0, planned - self._sample))


def _summary(out: Path, job: _Job, seconds: float) -> dict[str, Any]:
    trace = open_trace(out)
    segments = [segment for sample in range(trace.n_samples) for segment in trace.segments(sample)]
    scores: dict[str, list[float]] = defaultdict(list)
    for record in trace.samples:
        scores[record.task].extend([] if record.score is None else [record.score])
    return {
        "trace": str(out),
        "samples": trace.n_samples,
        "requests": job.plan.requests,
        "units": job.plan.units,
        "tokens": sum(segment.length for segment in segments),
        "decode_steps": sum(segment.length for segment in segments if segment.kind == "generated"),
        "seconds": seconds,
        "bytes": _folder_bytes(out),
        "score": {task: sum(all_) / len(all_) if all_ else None for task, all_ in scores.items()},
    }


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
