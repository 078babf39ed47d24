"""``live``: decode the real model under a plan, and hold it to full attention and to the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtune.caching import check_budgets
from kvtune.errors import InputError
from kvtune.geometry import ModelGeometry
from kvtune.models import LoadedModel
from kvtune.policies import get_policy
from kvtune.policies.base import Policy
from kvtune.policies.plan import Plan, as_plan
from kvtune.progress import Progress, silent
from kvtune.runtime.decoding import Answer, Segment, forced_pass, free_pass, full_pass, unseen
from kvtune.runtime.engine import OFFLOAD, Engine, EngineOptions, open_engine
from kvtune.runtime.forecast import QueryRecorder, RecordedSteps, forecast_log, sparse_layers
from kvtune.runtime.live_trace import LiveTrace, SampleTrace
from kvtune.runtime.measurements import CachePass, FreeAnswer, LiveRun, Predict
from kvtune.runtime.report import live_document
from kvtune.runtime.scoring import Scorer
from kvtune.workloads import Request, Sample, Workload

if TYPE_CHECKING:
    from kvtune.hardware import StepCost
    from kvtune.runtime.batch_run import BatchRun

DEFAULT_STEPS = 32


def live(
    loaded: LoadedModel,
    samples: Iterable[Sample],
    plan: Policy | Plan | str = "wave_index",
    *,
    cache_fraction: float = 0.05,
    decode: int = DEFAULT_STEPS,
    seed: int = 0,
    engine: str = "auto",
    offload: str = "none",
    free: bool = True,
    forecast: bool = True,
    workload: Workload | None = None,
    record: LiveTrace | None = None,
    batch: int | None = None,
    predict: Predict | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Decode each request of ``samples`` under ``plan`` and compare with full attention.

    **Forced**: each answer goes through both runs with the same tokens, the reference's, continued by full
    attention's greedy choice to ``decode`` tokens. KL to full attention and top-1 agreement are over all
    steps, paired ΔNLL over the reference's tokens (over all where there is no reference) with a bootstrap
    interval over answers. **Free** (unless ``free`` is false; it doubles the decode steps): both runs go on
    with their own greedy tokens, up to ``decode`` a turn, references being fed back between turns; this gives
    task scores by ``workload``'s measure and the drift.

    With one request a sample, the index is built at the end of prefill, over the context and the first
    question. With several, it is built once, over the context alone; every request forks from that state,
    and its questions join the index as decode-made tokens do. Later turns' tokens join it in both cases.
    Block caches start empty at every request, in free running also at every turn whose answer is replaced.

    Returns the JSON document of ``kvtune live``. ``windowed_layers`` are dense in the model's own sliding
    windows under every plan. ``hit_ratio`` is counted by the live caches,
    ``replayed_hit_ratio`` is the simulator's on the same accesses (``replay_equal``: access by access, in all
    passes), ``forecast_hit_ratio`` the simulator's on what the plan asks given full attention's queries of
    the same tokens (forced) or of its own answers (free), beside that run's ``live`` ratios. ``prefill_ms``
    and ``index_build_ms`` are per sample, ``stages_ms`` per step (of the fused engine: what the kernels of a
    few steps at the end took; they may overlap). ``gpu_bytes`` and ``host_bytes`` are of the
    longest sequence; ``bytes_are`` ``counted`` where the engine moves nothing. ``predicted_step_ms`` is what
    ``predict`` says, ``predicted_terms_ms`` its parts: together ``predicted_hidden_ms`` more, as some of them
    pass side by side. ``batch``: so many sequences are then decoded together (``BatchRun.measure`` of
    ``runtime.batch_run`` has its keys; ``None`` without). A run that is interrupted (Ctrl-C) after an answer
    returns what it has, with ``interrupted`` true.

    Raises ``InputError`` for a cache fraction outside (0, 1], a policy that evicts, an unknown engine, no
    decode steps, no requests, or a timeline beyond the model's positions; for a batch below 1, one that has
    no room, and one without the fused engine.
    """
    chosen = as_plan(get_policy(plan) if isinstance(plan, str) else plan)
    given = list(samples)
    _check(chosen, cache_fraction, offload)
    check_samples(loaded.geometry, given, decode)
    wanted = EngineOptions(cache_fraction, longest_timeline(given, decode), offload)
    opened = open_engine(engine, loaded, chosen, wanted)
    together = None if batch is None else _batch_kind().of(batch, opened, engine, wanted, given, decode)
    if record is not None:
        record.begin()
    run = LiveRun(CachePass(cache_fraction), CachePass(cache_fraction), timings=opened.timings)
    runner = _Runner(opened, run, decode, free, forecast, Scorer(loaded, workload), record)
    total = sum(len(sample.requests) for sample in given)
    try:
        with opened, (progress or silent).task("live decoding", total) as task:
            for number, sample in enumerate(given):
                runner(number, sample, task.advance)
            opened.measure_stages()
    except KeyboardInterrupt:
        if not run.answers:
            raise
        run.interrupted = True
    if record is not None:
        record.finish()
    run.engine = {"engine": opened.name, "offload": opened.offload, "notes": list(opened.notes)}
    if together is not None and not run.interrupted:
        together.measure(run, predict, progress)
    return live_document(run, chosen, loaded.geometry, seed, _predicted(predict, run, chosen))


@dataclass
class _Runner:
    """Runs samples one after the other."""

    engine: Engine
    run: LiveRun
    decode: int
    free: bool
    forecast: bool
    scorer: Scorer
    record: LiveTrace | None
    _prefilled: int = 0
    _context: int = 0
    _timelines: itertools.count[int] = field(default_factory=itertools.count)

    def __call__(self, number: int, sample: Sample, advance: Callable[[], None]) -> None:
        engine = self.engine
        engine.start()
        self._prefilled = len(engine.timings.prefill)
        self._timelines = itertools.count()
        with nullcontext() if self.record is None else self.record.sample(number, engine) as trace:
            if sample.context_ids:
                unasked = any(not request.turns[0].question_ids for request in sample.requests)
                with _segment(trace, -1)("context", -1, sample.context_ids):
                    self._feed(sample.context_ids, then_build=len(sample.requests) > 1 or unasked)
            base = engine.mark()
            for request_number, request in enumerate(sample.requests):
                if request_number:
                    engine.rewind(base)
                self._request(request, sample.task, (number, request_number), trace)
                advance()

    def _request(self, request: Request, task: str, unit: tuple[int, int], trace: SampleTrace | None) -> None:
        """One request: full attention, then the plan; forced to the same tokens, then free."""
        engine, run, segment = self.engine, self.run, _segment(trace, unit[1])
        question = request.turns[0].question_ids
        if question:
            with segment("question", 0, question):
                self._feed(question, then_build=not engine.built)
        ready = engine.mark()
        full = self._full(request)
        for caches, stretches in ((run.forced, full.forced), (run.free, full.free)):
            for recorded in stretches:
                reads = run.reads if caches is run.forced else None
                caches.add_forecast(forecast_log(engine, recorded, unit, self._context, reads))
        for comparison in forced_pass(engine, request, full.answers, segment):
            run.add_answer(comparison, engine.length)
        run.forced.add(engine, unit)
        run.hold(engine.held_bytes())
        run.requests += 1
        if trace is not None:
            trace.note(request, unit[1], task, [answer.tokens for answer in full.answers])
        if self.free:
            engine.rewind(ready)
            count = lambda: run.free.add(engine, (unit[0], next(self._timelines)))  # noqa: E731
            own = free_pass(engine, request, self.decode, count)
            self._score(request, task, full.free_answers, own)

    def _full(self, request: Request) -> _Full:
        """Both passes of full attention from behind the first question, and back there."""
        engine, start = self.engine, self.engine.length
        asked = engine.mark()
        recorder = QueryRecorder(sparse_layers(engine) if self.forecast else ())
        with engine.full_attention():
            full = _Full(full_pass(engine, request, self.decode, recorder))
            full.forced.append(recorder.take(engine, start))
            engine.rewind(asked)
            if self.free:
                keep = lambda: full.free.append(recorder.take(engine, start))  # noqa: E731
                full.free_answers = free_pass(engine, request, self.decode, keep, recorder)
                engine.rewind(asked)
        return full

    def _feed(self, ids: Sequence[int], then_build: bool) -> None:
        """Prefill; where the index follows, note what both took."""
        engine, run = self.engine, self.run
        engine.feed(ids, then_build=then_build)
        if then_build:
            self._context = engine.length
            run.prefill.append(sum(engine.timings.prefill[self._prefilled :]))
            run.index_build.append(engine.timings.index_build[-1])

    def _score(
        self, request: Request, task: str, full: list[tuple[int, ...]], own: list[tuple[int, ...]]
    ) -> None:
        for number, (turn, one, other) in enumerate(zip(request.turns, full, own)):
            scores = self.scorer(turn, one), self.scorer(turn, other)
            self.run.free_answers.append(FreeAnswer(number, task, one, other, *scores))


@dataclass
class _Full:
    """What full attention answered to a request, and the steps recorded on the way, by timeline."""

    answers: list[Answer]
    forced: list[dict[int, RecordedSteps]] = field(default_factory=list)
    free: list[dict[int, RecordedSteps]] = field(default_factory=list)
    free_answers: list[tuple[int, ...]] = field(default_factory=list)


def _batch_kind() -> type[BatchRun]:
    """Loaded when it is asked for: it brings the kernels' compiler, which need not be installed."""
    try:
        from kvtune.runtime.batch_run import BatchRun
    except ImportError as error:
        message = f"--batch decodes by the fused engine, which cannot be loaded ({error})"
        raise InputError(message, "leave out --batch") from None
    return BatchRun


def _predicted(predict: Predict | None, run: LiveRun, plan: Plan) -> StepCost | None:
    """What the cost model says; ``None``, with a note, where it cannot tell."""
    if predict is None:
        return None
    try:
        return predict(run, plan)
    except InputError as error:
        run.engine["notes"].append(f"the step's time is not predicted: {error.message}")
        return None


def _segment(trace: SampleTrace | None, request: int) -> Segment:
    return unseen if trace is None else trace.segments(request)


def longest_timeline(samples: Iterable[Sample], decode: int) -> int:
    """Tokens of the longest timeline, answers included; 0 without requests."""
    return max(
        (
            len(sample.context_ids)
            + sum(len(turn.question_ids) + max(decode, len(turn.reference_ids)) for turn in request.turns)
            for sample in samples
            for request in sample.requests
        ),
        default=0,
    )


def check_samples(geometry: ModelGeometry, samples: list[Sample], decode: int) -> None:
    """``InputError`` where there is nothing to run, or a timeline longer than the model can serve."""
    if decode < 1:
        raise InputError(f"--decode must be at least 1, not {decode}")
    longest = longest_timeline(samples, decode)
    if not longest:
        raise InputError("there was no request to run")
    if longest > geometry.max_positions:
        raise InputError(
            f"the longest timeline has {longest} tokens, the model takes {geometry.max_positions}",
            "lower --context, or raise the limit with --rope yarn:4",
        )


def _check(plan: Plan, fraction: float, offload: str) -> None:
    """Refuse settings that cannot run, before anything does."""
    check_budgets([fraction])
    if plan.policy.evicts:
        raise InputError(f"policy '{plan.policy.name}' evicts tokens and cannot run live yet")
    if offload not in OFFLOAD:
        raise InputError(f"--offload is {' or '.join(OFFLOAD)}, not '{offload}'")
