"""What decodes: the calls that a live run makes, whatever carries them out.

A live run speaks to an engine in this order, for each sample::

    engine.start()
    engine.feed(context, then_build=…)      # dense prefill; with several requests one index for all of them
    base = engine.mark()
    for each request:
        engine.rewind(base)
        engine.feed(question, then_build=…) # dense; joins the index if there is one, else the index follows
        ready = engine.mark()
        with engine.full_attention():       # the reference: steps and feeds, then engine.rewind(ready)
            engine.step(token) ...
        engine.step(token) ...              # the plan: steps, and feeds of later questions
        engine.access_log(), engine.hit_masks(), engine.counters(), engine.held_bytes()
        engine.rewind(ready)                # for each further pass over the same request
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, Self

from torch import Tensor

from kvtune.caching import AccessLog, Unit
from kvtune.capturing.hook import Sink
from kvtune.errors import RunError, unknown
from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.models import LoadedModel
from kvtune.policies.plan import Plan

TORCH, FUSED = "torch", "fused"
_ENGINES = {
    TORCH: "kvtune.runtime.torch_engine:TorchEngine",
    FUSED: "kvtune.runtime.fused_engine:FusedEngine",
}
"""Name → module:class, each made as ``class(loaded, plan, options)``."""
AUTO = "auto"
OFFLOAD = ("none", "cpu")


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is made for.

    cache_fraction  page slots of each unit × 8 ÷ context tokens
    longest         tokens of the longest timeline that will be run, answers included: sizes buffers
    offload         where keys and values outside the GPU's share are kept: ``none`` (where they are) or
                    ``cpu`` (pinned host memory)
    """

    cache_fraction: float
    longest: int
    offload: str = "none"


@dataclass
class Timings:
    """Seconds an engine spent, with its device at rest at both ends of each entry.

    ``prefill`` and ``index_build`` have one entry per call of ``feed`` (outside of ``full_attention``) and
    ``build``; a feed that the index follows has one of both. An engine that builds beside the prefill counts
    the time to the end of the model's own work as ``prefill``, slowed down by what is built meanwhile, and
    as ``index_build`` only what is left to wait for: the sum is what the user waits.
    ``steps`` and ``full_steps`` have one per decode step under the plan and with full attention;
    ``stages`` adds up the parts of ``stage_steps`` steps by name, as far as the engine tells them apart.
    """

    prefill: list[float] = field(default_factory=list)
    index_build: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    full_steps: list[float] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    stage_steps: int = 0


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of one sequence, all layers, by where they are held.

    cache       page slots of the block caches
    index       centroids, value sums, bounds: what the policy adds to the keys and values
    buffers     execution buffers and whatever else a step works in
    steady      tokens that are always resident (and all of a dense layer's, inside its window)
    host        keys and values in host memory
    full_kv     what full attention keeps at this length: of a layer with a window, that much
    counted     true: what the plan needs on an engine that moves keys and values, counted; false: allocated
    """

    cache: int
    index: int
    buffers: int
    steady: int
    host: int
    full_kv: int
    counted: bool

    @property
    def total(self) -> int:
        """Bytes on the GPU."""
        return self.cache + self.index + self.buffers + self.steady


class Engine(Protocol):
    """Runs one sequence at a time: prefill dense, decode under a plan or with full attention.

    Use it in a ``with`` block: entering makes it ready, leaving releases the model and all memory.

    name      as it is reported; ``offload`` says where keys and values really are (``none``, ``cpu``)
    notes     remarks for the user (a kernel that could not be compiled, an option without effect)
    timings   of everything since it was made
    length    tokens passed so far; the next gets this position
    logits    [V] after the last token, on the model's device, in its precision
    built     whether there is an index
    """

    name: str
    offload: str
    notes: list[str]
    loaded: LoadedModel
    plan: Plan
    timings: Timings

    @property
    def length(self) -> int: ...

    @property
    def logits(self) -> Tensor: ...

    @property
    def built(self) -> bool: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def start(self) -> None:
        """Forget everything: a new sequence of length 0, without index, caches and log."""

    def feed(self, ids: Sequence[int], then_build: bool = False) -> None:
        """Dense prefill of ``ids`` (one or more) after what there is, chunked.

        Where there is an index, the tokens join it as decode-made ones do. ``then_build``: as if
        :meth:`build` followed, which an engine may do meanwhile; ``ValueError`` if there is an index, or
        inside :meth:`full_attention`.
        """

    def build(self) -> None:
        """Build every layer's index over all tokens so far, with empty caches; ``ValueError`` if built."""

    def step(self, token: int) -> Tensor:
        """One decode step: feed ``token`` and return the logits [V] after it, float32.

        Under the plan; with full attention inside :meth:`full_attention`. The tensor is the caller's.
        Builds the index first where there is none.
        """

    def full_attention(self) -> AbstractContextManager[None]:
        """Inside, ``feed`` and ``step`` use full attention and neither read nor change index, caches, log.

        What they add must be forgotten with :meth:`rewind` before the plan goes on.
        """

    def showing(self, sink: Sink, first: int = 0) -> AbstractContextManager[None]:
        """Inside, every layer's queries at positions ≥ ``first`` go to ``sink(layer, position, queries)``.

        queries [t, Hq, d] of consecutive positions from ``position`` on; views, to be copied if kept.
        """

    def keys_values(self, layer: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Keys [H, n, d] and values [H, n, dv] at positions ≥ ``start``: views, to be copied if kept."""

    def index(self, layer: int) -> Any:
        """The policy's own index of a layer that is not dense, as it is now: the caller's to append to."""

    def mark(self) -> Any:
        """The whole state, to come back to as often as wanted, until :meth:`start`.

        Only between steps of which none followed the last ``build``, ``rewind`` or full attention under the
        plan: caches and log are empty at a mark, so that an engine need not keep copies of them.
        """

    def rewind(self, mark: Any) -> None:
        """Go back to ``mark``: tokens, logits, index as they were; caches, log and counters empty.

        A mark from before the build has no index: going back there forgets it.
        """

    def measure_stages(self) -> None:
        """Fill in ``timings.stages``, where that takes steps of its own: at the end of a run.

        Tokens and index are as before, caches, log and counters empty.
        """

    def access_log(self, sample: int = 0, timeline: int = 0) -> AccessLog:
        """What every unit asked of its cache since the last build or rewind."""

    def hit_masks(self, sample: int = 0, timeline: int = 0) -> dict[Unit, list[bool]]:
        """Whether each access of :meth:`access_log` was a hit, in its order."""

    def counters(self) -> dict[str, tuple[int, int]]:
        """Hits and accesses by unit of counting (``request``, ``page``, ``token``) since build or rewind.

        Counted by the cache itself, not derived from the log.
        """

    def held_bytes(self) -> HeldBytes:
        """Bytes held for the sequence as it is now (buffers: the most of any step since build or rewind)."""


def full_kv_bytes(geometry: ModelGeometry, length: int) -> int:
    """What full attention keeps of ``length`` tokens: all of them, or a layer's window of them."""
    return sum(dense_bytes(geometry.layer(number), length) for number in range(geometry.n_layers))


def dense_bytes(info: LayerInfo, length: int) -> int:
    """Keys and values that a dense layer keeps of ``length`` tokens."""
    kept = length if info.window is None else min(length, info.window)
    return kept * info.token_bytes * info.n_kv_heads


def engine_names() -> list[str]:
    """What ``--engine`` takes."""
    return [AUTO, *_ENGINES]


def open_engine(name: str, loaded: LoadedModel, plan: Plan, options: EngineOptions) -> Engine:
    """The engine called ``name``.

    ``auto`` is ``fused`` on a CUDA device where it serves the plan and its kernels pass a check, else
    ``torch``, which runs every policy that does not evict on any device. Raises ``InputError`` for an unknown
    name or what the engine refuses, ``RunError`` where ``fused`` was asked for and its kernels fail.
    """
    if name != AUTO and name not in _ENGINES:
        raise unknown("engine", name, engine_names())
    if name != AUTO:
        engine = _make(name, loaded, plan, options)
        if name == FUSED:
            _require_kernels(loaded, plan, options)
        return engine
    reason = None
    if loaded.device.type == "cuda":
        reason = _why_not_fused(loaded, plan, options)
        if reason is None:
            return _make(FUSED, loaded, plan, options)
    engine = _make(TORCH, loaded, plan, options)
    if reason is not None:
        engine.notes.append(f"the torch engine runs: {reason}")
    return engine


def _make(name: str, loaded: LoadedModel, plan: Plan, options: EngineOptions) -> Engine:
    module, _, kind = _ENGINES[name].partition(":")
    try:
        make: Callable[[LoadedModel, Plan, EngineOptions], Engine] = getattr(import_module(module), kind)
    except ImportError as error:
        raise RunError(f"the {name} engine cannot be loaded ({error})", "use --engine torch") from None
    return make(loaded, plan, options)


def _why_not_fused(loaded: LoadedModel, plan: Plan, options: EngineOptions) -> str | None:
    """Why the fused engine does not run ``plan`` here; ``None`` if it does."""
    try:
        methods = import_module("kvtune.runtime.fused_methods")
    except ImportError as error:
        return f"the fused engine cannot be loaded ({error})"
    geometry = loaded.geometry
    layers = [geometry.layer(number) for number in range(geometry.n_layers)]
    refused: str | None = methods.plan_refusal(plan, layers)
    return refused or _failure(loaded, plan, options)


def _require_kernels(loaded: LoadedModel, plan: Plan, options: EngineOptions) -> None:
    reason = _failure(loaded, plan, options)
    if reason is not None:
        raise RunError(f"the fused engine: {reason}", "use --engine torch")


def _failure(loaded: LoadedModel, plan: Plan, options: EngineOptions) -> str | None:
    """What a small step by the kernels says against them."""
    reason: str | None = import_module("kvtune.runtime.kernel_check").check_kernels(
        loaded, plan, options.offload
    )
    return reason
