"""Everything a live run measures, gathered request by request; a report is made of it at any time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtune.caching import AccessLog, Tally, UnitAccesses, simulate
from kvtune.caching.tally import COLD, count_accesses, count_whole_hits
from kvtune.runtime.comparison import AnswerComparison
from kvtune.runtime.engine import Engine, HeldBytes, Timings
from kvtune.runtime.layer_reads import LayerReads

if TYPE_CHECKING:
    from kvtune.hardware import StepCost

UNITS = ("page", "request", "token")

Predict = Callable[..., "StepCost"]
"""A cost model of a run's decode step, ``(run, plan)`` or, of several sequences, ``(run, plan, batch)``.

Like ``runtime.step_prediction.StepPredictor``. ``InputError`` says why it cannot tell; that becomes a note.
"""


@dataclass
class CachePass:
    """The block caches of all requests in one kind of pass (forced or free).

    counters     hits and accesses by unit of counting, as the live caches counted them
    replayed     the simulator's, fed with the live run's own access log
    forecast     the simulator's, on what the plan would have asked under full attention
    layers       the live caches', by layer, over all kv heads and ``steps`` decode steps
    equal        whether the replay agreed on every single access
    truncations  blocks dropped because the execution buffer was full
    """

    fraction: float
    counters: dict[str, list[int]] = field(default_factory=lambda: {name: [0, 0] for name in UNITS})
    replayed: Tally = field(default_factory=lambda: Tally.empty(1))
    forecast: Tally = field(default_factory=lambda: Tally.empty(1))
    layers: dict[int, Tally] = field(default_factory=dict)
    steps: int = 0
    equal: bool = True
    truncations: int = 0

    def add(self, engine: Engine, unit: tuple[int, int]) -> None:
        """What the engine's caches did since its last build or rewind; ``unit`` is (sample, timeline)."""
        for name, (hits, asked) in engine.counters().items():
            self.counters[name][0] += hits
            self.counters[name][1] += asked
        log, masks = engine.access_log(*unit), engine.hit_masks(*unit)
        self.truncations += sum(int(accesses.truncated.sum()) for _, accesses in log)
        if not log.units:
            return
        (result,) = simulate(log, [self.fraction], "wave", keep_hits=True)
        self.replayed += result.tally
        for one, accesses in log:
            pages = result.units[one].page_hits
            assert pages is not None
            first = np.cumsum(accesses.pages) - accesses.pages
            self.equal = self.equal and pages[first].tolist() == masks[one]
            layer = one[2]
            self.layers[layer] = self.layers.get(layer, Tally.empty(1)) + _tally(accesses, masks[one])
        self.steps += max(accesses.steps for _, accesses in log)

    def add_forecast(self, log: AccessLog) -> None:
        """Simulate a forecast's accesses."""
        if log.units:
            self.forecast += simulate(log, [self.fraction], "wave")[0].tally

    @property
    def asked(self) -> bool:
        """Whether the policy asked anything of a cache."""
        return bool(self.replayed.accesses[COLD].any())

    def live(self) -> dict[str, float | None]:
        """Hit ratios as the live caches counted them; ``None`` without accesses."""
        return {name: hits / asked if asked else None for name, (hits, asked) in self.counters.items()}


def _tally(accesses: UnitAccesses, hits: list[bool]) -> Tally:
    """What a live cache answered, block by block."""
    mask = np.array(hits, np.bool_)
    return Tally(count_whole_hits(accesses, mask)[None], count_accesses(accesses))


@dataclass(frozen=True)
class FreeAnswer:
    """An answer of each side, running free: its tokens and its score (``None``: no reference)."""

    turn: int
    task: str
    full: tuple[int, ...]
    plan: tuple[int, ...]
    full_score: float | None
    plan_score: float | None

    @property
    def diverges_at(self) -> int | None:
        """The first token in which the answers differ; ``None`` where they are equal."""
        for at, (one, other) in enumerate(zip(self.full, self.plan)):
            if one != other:
                return at
        return None if len(self.full) == len(self.plan) else min(len(self.full), len(self.plan))


@dataclass
class LiveRun:
    """What has been measured so far.

    ``prefill`` and ``index_build``: seconds of each sample's dense prefill before its index, and of the
    index. ``reads``: by layer, on the forced tokens (empty without a forecast). ``held`` is of the longest
    sequence. ``batch``: several sequences decoded together, where asked (see ``runtime.batch_run``).
    ``interrupted``: the user stopped the run.
    """

    forced: CachePass
    free: CachePass
    answers: list[AnswerComparison] = field(default_factory=list)
    free_answers: list[FreeAnswer] = field(default_factory=list)
    requests: int = 0
    reads: dict[int, LayerReads] = field(default_factory=dict)
    prefill: list[float] = field(default_factory=list)
    index_build: list[float] = field(default_factory=list)
    held: HeldBytes | None = None
    timings: Timings = field(default_factory=Timings)
    engine: dict[str, Any] = field(default_factory=dict)
    batch: dict[str, Any] | None = None
    interrupted: bool = False

    _visible: float = 0.0

    def add_answer(self, answer: AnswerComparison, length: int) -> None:
        """A forced answer, at whose end the sequence has ``length`` tokens."""
        steps = len(answer.kl)
        self.answers.append(answer)
        self._visible += steps * (length - (steps - 1) / 2)

    @property
    def visible_tokens(self) -> float:
        """Tokens that a forced decode step sees, its own included: the mean over all."""
        return self._visible / sum(len(answer.kl) for answer in self.answers)

    def hold(self, held: HeldBytes) -> None:
        """Keep the bytes of the longest sequence."""
        if self.held is None or held.full_kv > self.held.full_kv:
            self.held = held
