"""What a policy moves and keeps on a recorded trace, layer by layer: a trace as the cost model's input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from torch import Tensor

from kvtune.analysis.checks import chosen_layers
from kvtune.analysis.evaluate import build_index, chunks, decode_queries
from kvtune.caching import AccessLog, CacheResult, capacity_pages, unit_accesses
from kvtune.caching.access_log import join_accesses
from kvtune.caching.tally import COLD, PAGE, TOKEN
from kvtune.errors import InputError
from kvtune.geometry import PAGE_TOKENS, LayerInfo, ModelGeometry
from kvtune.hardware.cost import Offload
from kvtune.hardware.memory import SequenceMemory, kv_bytes
from kvtune.hardware.traffic import LayerTraffic, Traffic, dense_traffic
from kvtune.policies.base import Policy, Selection
from kvtune.policies.full import Full
from kvtune.policies.plan import Plan, as_plan
from kvtune.progress import Progress, silent
from kvtune.traces import Timeline, Trace


@dataclass(frozen=True)
class Missed:
    """Bytes that a cache lacked over a run: of pages, and of the tokens in them."""

    pages: float = 0.0
    tokens: float = 0.0


@dataclass
class LayerDemand:
    """One layer over the timelines of a trace and the kv heads held: sums over steps, and what was largest.

    index_bytes, resident_tokens (of all heads) and step_pages (retrieved at one step) are those of the
    timeline that had most.
    """

    steps: int = 0
    scan: float = 0.0
    estimation: float = 0.0
    exact: float = 0.0
    attended: float = 0.0
    blocks: int = 0
    index_bytes: int = 0
    resident_tokens: int = 0
    step_pages: int = 0

    def add(self, selection: Selection, layer: LayerInfo) -> None:
        """Count the steps of one selection."""
        self.steps += selection.positions.shape[0]
        exact = selection.pages() * layer.page_bytes
        self.scan += float(selection.scan_bytes.sum())
        self.exact += float(exact.sum())
        self.attended += float(selection.exact_tokens().sum()) * layer.token_bytes
        self.estimation += float((selection.read_bytes(layer) - exact - selection.scan_bytes).sum())
        resident = selection.positions[..., : selection.resident]
        self.resident_tokens = max(self.resident_tokens, _most(resident >= 0))
        if selection.blocks is not None and selection.block_pages is not None:
            self.blocks += int((selection.blocks >= 0).sum())
            self.step_pages = max(self.step_pages, int(selection.block_pages.sum((1, 2)).max()))

    def traffic(self, missed: Missed, scale: float) -> LayerTraffic:
        """Means over the steps for the whole layer; ``scale`` is its kv heads ÷ those held."""
        share = scale / max(self.steps, 1)
        return LayerTraffic(
            scan_bytes=self.scan * share,
            estimation_bytes=self.estimation * share,
            exact_bytes=self.exact * share,
            missed_bytes=missed.pages * share,
            blocks=self.blocks * share,
            attended_bytes=self.attended * share,
            fetched_bytes=missed.tokens * share,
        )


@dataclass
class Demand:
    """A policy's demand on a trace.

    ``tokens`` is the mean number of visible tokens at a decode step, ``longest`` the longest timeline,
    ``context_tokens`` the longest prompt; ``layers`` holds the layers measured that are not dense.
    """

    geometry: ModelGeometry
    plan: Plan
    infos: tuple[LayerInfo, ...]
    scale: float
    log: AccessLog
    tokens: float = 0.0
    longest: int = 0
    context_tokens: int = 0
    layers: dict[int, LayerDemand] = field(default_factory=dict)

    def is_dense(self, layer: int) -> bool:
        """Whether a layer of the model keeps full attention under the plan."""
        return isinstance(self.plan.for_layer(self.infos[layer]), Full)

    def traffic(self, result: CacheResult | None = None) -> Traffic:
        """Traffic of every layer of the model, with the misses of ``result`` (from an empty cache).

        Dense layers are reckoned from the visible tokens. A layer that was not measured is taken as the mean
        of those that were. Raises ``InputError`` where none was.
        """
        missed = {} if result is None else _missed_bytes(result)
        measured = {
            number: layer.traffic(missed.get(number, Missed()), self.scale)
            for number, layer in self.layers.items()
        }
        return tuple(
            dense_traffic(self.geometry.layer(number), self.tokens)
            if self.is_dense(number)
            else measured.get(number) or _mean(measured)
            for number in range(self.geometry.n_layers)
        )

    def memory(self, cache_fraction: float, offload: Offload) -> SequenceMemory:
        """Bytes of the longest timeline on the device, with a page cache of ``cache_fraction``."""
        total = SequenceMemory()
        for number in range(self.geometry.n_layers):
            layer = self.geometry.layer(number)
            if self.is_dense(number):
                total += SequenceMemory(kv=kv_bytes(layer, self.longest))
                continue
            demand = self.layers.get(number) or _largest(self.layers)
            index = demand.index_bytes * self.scale
            if offload == "none":
                total += SequenceMemory(index=index, kv=kv_bytes(layer, self.longest))
                continue
            pages = capacity_pages(cache_fraction, self.context_tokens) * layer.n_kv_heads
            total += SequenceMemory(
                index=index,
                steady=demand.resident_tokens * self.scale * layer.token_bytes,
                cache=pages * layer.page_bytes if demand.blocks else 0.0,
                buffer=demand.step_pages * self.scale * layer.page_bytes,
            )
        return total


def measure_demand(
    trace: Trace,
    policy: Policy | Plan,
    layers: Iterable[int] | None = None,
    progress: Progress | None = None,
) -> Demand:
    """Let ``policy`` select on the decode steps of ``trace``; its accesses are the demand's ``log``.

    Raises ``InputError`` for a layer that the trace lacks, and a trace without decode steps.
    """
    plan = as_plan(policy)
    chosen = chosen_layers(trace, layers)
    geometry = trace.geometry
    demand = Demand(
        geometry=geometry,
        plan=plan,
        infos=tuple(trace.layer_info(layer) for layer in range(geometry.n_layers)),
        scale=geometry.n_kv_heads / len(trace.kv_heads),
        log=AccessLog(page_bytes=geometry.layer(0).page_bytes),
    )
    timelines = [timeline for sample in range(trace.n_samples) for timeline in trace.timelines(sample)]
    seen: list[Tensor] = []
    with (progress or silent).task("selecting", len(timelines) * len(chosen)) as task:
        for timeline in timelines:
            for number in chosen:
                positions = _measure(demand, timeline, number)
                task.advance()
            demand.context_tokens = max(demand.context_tokens, timeline.prompt_length)
            demand.longest = max(
                demand.longest, timeline.prompt_length, int(positions.max()) + 1 if len(positions) else 0
            )
            seen.append(positions + 1)
    visible = [int(tokens) for positions in seen for tokens in positions]
    if not visible:
        raise InputError(
            f"the trace '{trace.path}' holds no decode steps", "capture it with --decode 1 or more"
        )
    demand.tokens = sum(visible) / len(visible)
    return demand


def _measure(demand: Demand, timeline: Timeline, number: int) -> Tensor:
    """One layer of one timeline: its accesses into the log, its bytes into the demand; its positions [T]."""
    trace = timeline.trace
    layer = timeline.layer(number)
    policy = demand.plan.for_layer(layer.info)
    index = build_index(policy, layer, timeline.prompt_length)
    steps = decode_queries(layer)
    found = LayerDemand() if demand.is_dense(number) else demand.layers.setdefault(number, LayerDemand())
    parts = []
    for chunk in chunks(len(steps.positions)):
        selection = policy.select(index, steps.queries[chunk], steps.positions[chunk])
        found.add(selection, layer.info)
        heads = range(layer.keys.shape[0])
        parts.append([unit_accesses(selection, head, timeline.prompt_length) for head in heads])
    found.index_bytes = max(found.index_bytes, policy.index_bytes(index, layer.info))
    for place, head in enumerate(trace.kv_heads):
        accesses = join_accesses([part[place] for part in parts], timeline.prompt_length)
        demand.log.units[timeline.sample, timeline.index, number, head] = accesses
    return steps.positions


def _missed_bytes(result: CacheResult) -> dict[int, Missed]:
    """What was missed in each layer, from an empty cache, over all its units and their steps."""
    missed: dict[int, Missed] = {}
    for (_, _, layer, _), unit in result.units.items():
        lacking = unit.tally.accesses[COLD] - unit.tally.hits[0, COLD]
        before = missed.get(layer, Missed())
        missed[layer] = Missed(
            before.pages + float(lacking[PAGE]) * result.page_bytes,
            before.tokens + float(lacking[TOKEN]) * result.page_bytes / PAGE_TOKENS,
        )
    return missed


def _most(present: Tensor) -> int:
    """The largest number of tokens, over the kv heads, at any step of a mask [t, H, S]."""
    return int(present.sum((1, 2)).max()) if present.numel() else 0


def _mean(measured: Mapping[int, LayerTraffic]) -> LayerTraffic:
    if not measured:
        raise InputError("no layer was measured that the policy serves", "leave out --layers")
    names = [part.name for part in fields(LayerTraffic) if part.name != "dense"]
    layers = list(measured.values())
    means = {name: sum(getattr(layer, name) for layer in layers) / len(layers) for name in names}
    return replace(layers[0], **means)


def _largest(layers: Mapping[int, LayerDemand]) -> LayerDemand:
    if not layers:
        raise InputError("no layer was measured that the policy serves", "leave out --layers")
    return max(layers.values(), key=lambda layer: (layer.index_bytes, layer.resident_tokens))
