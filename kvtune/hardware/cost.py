"""The time of a decode step: DESIGN's formula, every term named.

Per layer ``scan + choose + id_copy + max(estimate, lookup + fetch) + attend + update + append + fixed``;
``step = Σ layers + projections + launches``. A stage that was fitted on the machine costs what its fit says;
one that was not costs its bytes at the bandwidth that serves it, and the start of one kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvtune.errors import InputError
from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.hardware.machine import Hardware
from kvtune.hardware.traffic import LayerTraffic, Traffic

Offload = Literal["cpu", "none"]
Resource = Literal["device memory", "PCIe", "compute", "launch"]

TERMS = (
    "scan", "choose", "id_copy", "estimate", "lookup", "fetch", "attend", "update", "append",
    "fixed", "projections", "launches",
)  # fmt: skip
"""In the order of the formula. The first nine are stages of one layer's attention."""


@dataclass(frozen=True)
class Features:
    """What a stage's time depends on: bytes of the whole batch, and the entries of one kv head.

    ``entries``: what a kv head of one sequence does beyond its bytes, however many others run beside it.
    """

    bytes: float = 0.0
    entries: float = 0.0


@dataclass(frozen=True)
class Term:
    """One term: its seconds, those of them that are mere latency, its bytes, and what it waits for."""

    seconds: float
    latency: float
    bytes: float
    resource: Resource


@dataclass(frozen=True)
class LayerCost:
    """One layer. ``hidden`` seconds of its terms pass while another term's do."""

    terms: Mapping[str, Term]
    hidden: float

    @property
    def seconds(self) -> float:
        """The layer without the bytes of its weights."""
        return sum(term.seconds for term in self.terms.values()) - self.hidden

    @property
    def attention_seconds(self) -> float:
        """Attention alone: what a live run measures per layer."""
        return self.seconds - self.terms["fixed"].seconds


@dataclass(frozen=True)
class StepCost:
    """One decode step of ``batch`` sequences."""

    batch: int
    layers: tuple[LayerCost, ...]
    projections: Term
    launches: Term

    @property
    def seconds(self) -> float:
        return sum(layer.seconds for layer in self.layers) + self.projections.seconds + self.launches.seconds

    @property
    def hidden(self) -> float:
        """Seconds of the terms that pass while others do: the terms' sum is the total plus this."""
        return sum(layer.hidden for layer in self.layers)

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.seconds

    @property
    def terms(self) -> dict[str, Term]:
        """Each term over all layers, in the formula's order; one that never occurs has zero seconds."""
        found: dict[str, list[Term]] = {name: [] for name in TERMS}
        for layer in self.layers:
            for name, term in layer.terms.items():
                found[name].append(term)
        found["projections"].append(self.projections)
        found["launches"].append(self.launches)
        return {name: _sum(terms) for name, terms in found.items()}

    @property
    def shares(self) -> dict[Resource, float]:
        """Which share of the step waits for each resource; they add up to 1. Hidden terms do not count."""
        seconds: dict[Resource, float] = defaultdict(float)
        for layer in self.layers:
            for term in _waited_for(layer):
                seconds[term.resource] += term.seconds - term.latency
                seconds["launch"] += term.latency
        for term in (self.projections, self.launches):
            seconds[term.resource] += term.seconds - term.latency
            seconds["launch"] += term.latency
        total = self.seconds
        return {resource: value / total for resource, value in seconds.items()}

    @property
    def bound_by(self) -> Resource:
        """The resource that saturates: the one that most of the step waits for."""
        shares = self.shares
        return max(shares, key=lambda resource: shares[resource])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: ``total_ms``, ``terms`` (ms) and ``bytes`` over all layers and the batch, ``bound_by``.

        ``terms`` sum up to ``total_ms + hidden_ms``.
        """
        terms = self.terms
        return {
            "total_ms": self.seconds * 1e3,
            "terms": {name: term.seconds * 1e3 for name, term in terms.items()},
            "hidden_ms": self.hidden * 1e3,
            "bytes": {name: term.bytes for name, term in terms.items()},
            "shares": dict(self.shares),
            "bound_by": self.bound_by,
        }


def step_cost(
    hardware: Hardware,
    geometry: ModelGeometry,
    traffic: Traffic,
    *,
    batch: int = 1,
    weights_bytes: float = 0.0,
    offload: Offload = "cpu",
) -> StepCost:
    """Predict one decode step of ``batch`` sequences with the same ``traffic`` each.

    ``weights_bytes`` are read once a step (with 0, the step is attention and launches alone). ``offload``:
    ``cpu`` keeps the KV in host memory behind a page cache, ``none`` on the device, where nothing is looked
    up, fetched or cached. Raises ``InputError`` for a batch below 1, traffic that does not match the
    geometry, and an offload without a link between host and device.
    """
    if batch < 1:
        raise InputError(f"the batch must be 1 or more, not {batch}")
    if len(traffic) != geometry.n_layers:
        raise InputError(f"traffic of {len(traffic)} layers does not fit a model of {geometry.n_layers}")
    check_offload(hardware, offload)
    layers = [
        layer_cost(hardware, geometry.layer(number), layer, batch=batch, offload=offload)
        for number, layer in enumerate(traffic)
    ]
    launches = hardware.launch.step_overhead_us * 1e-6
    return StepCost(
        batch=batch,
        layers=tuple(layers),
        projections=_projections(hardware, weights_bytes, batch, geometry.item_bytes),
        launches=Term(launches, launches, 0.0, "launch"),
    )


def layer_cost(
    hardware: Hardware,
    layer: LayerInfo,
    traffic: LayerTraffic,
    *,
    batch: int = 1,
    offload: Offload = "cpu",
) -> LayerCost:
    """One layer's terms: its stages, and ``fixed``."""
    terms = {
        name: _stage(hardware, layer, name, features, offload, traffic.dense)
        for name, features in stage_features(
            layer, traffic, batch, offload, hardware.stages.estimation
        ).items()
    }
    hidden = min(terms["estimate"].seconds, _fetching(terms)) if "estimate" in terms else 0.0
    overhead = hardware.launch.layer_overhead_us * 1e-6
    return LayerCost({**terms, "fixed": Term(overhead, overhead, 0.0, "launch")}, hidden)


def stage_features(
    layer: LayerInfo,
    traffic: LayerTraffic,
    batch: int,
    offload: Offload,
    estimation: str = "beside_fetch",
) -> dict[str, Features]:
    """What each stage of a layer works on: the features that stages are fitted on and predicted from.

    Only stages that occur are there. Bytes count the whole batch:

    - scan: the index; choose: a float32 logit of every block and query head, written and read; id_copy: an
      int32 of every exact token, read and written; estimate: value sums and sizes; lookup: none;
      fetch: the missed tokens; update: the same, read and written; attend: the exact tokens (and the
      estimates with ``estimation`` ``in_attend``: then there is no stage estimate); append: the new token's
      key and value, read and written.
    - entries: of choose, pairs of retrieved blocks, which are ranked by comparing each with all; of id_copy
      and lookup, retrieved blocks; of attend, exact tokens.
    """
    append = Features(2.0 * batch * layer.token_bytes * layer.n_kv_heads)
    if traffic.dense:
        return {"attend": Features(batch * traffic.exact_bytes), "append": append}
    found = {}
    attended, retrieved = traffic.attended, traffic.blocks / layer.n_kv_heads
    row = layer.head_dim * layer.item_bytes
    if traffic.scan_bytes:
        found["scan"] = Features(batch * traffic.scan_bytes)
        found["choose"] = Features(batch * traffic.scan_bytes / row * layer.group * 4 * 2, retrieved**2)
    tokens = attended / layer.token_bytes
    if estimation == "in_attend":
        attended += traffic.estimation_bytes
    elif traffic.estimation_bytes:
        found["estimate"] = Features(batch * traffic.estimation_bytes)
    if traffic.blocks:
        found["id_copy"] = Features(batch * tokens * 4 * 2, retrieved)
    if offload == "cpu" and (traffic.blocks or traffic.missed_bytes):
        found["lookup"] = Features(0.0, retrieved)
        found["fetch"] = Features(batch * traffic.fetched)
        found["update"] = Features(2 * batch * traffic.fetched)
    return {**found, "attend": Features(batch * attended, tokens / layer.n_kv_heads), "append": append}


def check_offload(hardware: Hardware, offload: str) -> None:
    """``InputError`` for an unknown offload, or one that the machine cannot do."""
    if offload not in ("cpu", "none"):
        raise InputError(f"unknown offload '{offload}'", "known: cpu, none")
    if offload == "cpu" and hardware.host_to_device is None:
        message = f"'{hardware.name}' has no link between host and device: nothing can be offloaded"
        raise InputError(message, "use --offload none")


def _stage(
    hardware: Hardware, layer: LayerInfo, name: str, features: Features, offload: Offload, dense: bool
) -> Term:
    """The fitted stage, or its bytes at the bandwidth that serves it and the start of a kernel."""
    resource: Resource = "PCIe" if name == "fetch" else "device memory"
    fitted = hardware.stages.get("full" if dense and name == "attend" else name)
    if fitted is not None:
        latency = fitted.latency(features.entries)
        return Term(fitted.seconds(features.bytes, features.entries), latency, features.bytes, resource)
    node = hardware.node_seconds
    if name == "fetch":
        moving = hardware.transfer_seconds(features.bytes)
    else:
        moving = features.bytes / _bandwidth(hardware, layer, name, offload, dense)
    return Term(node + moving, node, features.bytes, resource)


def _bandwidth(hardware: Hardware, layer: LayerInfo, name: str, offload: Offload, dense: bool) -> float:
    """Device memory as the stage reads it: in one piece, copied, or rows and pages at random places."""
    memory = hardware.device_memory
    if name in ("id_copy", "update", "append"):
        return memory.copy_bytes_per_second
    if dense or name in ("scan", "choose"):
        return memory.read_bytes_per_second
    row = layer.head_dim * layer.item_bytes
    if name == "attend" and offload == "cpu":
        return hardware.gather_rate(layer.page_bytes / 2)  # a page is 8 keys in a row, then 8 values
    return hardware.gather_rate(row)


def _projections(hardware: Hardware, weights_bytes: float, batch: int, item_bytes: int) -> Term:
    """Projections, MLP and output layer: their weights are read once, and multiplied with each token."""
    memory = hardware.device_memory
    reading = weights_bytes / (memory.weights_bytes_per_second or memory.read_bytes_per_second)
    multiplying = 2.0 * batch * weights_bytes / item_bytes / hardware.matmul_flops_per_second
    resource: Resource = "device memory" if reading >= multiplying else "compute"
    return Term(max(reading, multiplying), 0.0, weights_bytes, resource)


def _sum(terms: list[Term]) -> Term:
    """The same term of several layers."""
    return Term(
        seconds=sum(term.seconds for term in terms),
        latency=sum(term.latency for term in terms),
        bytes=sum(term.bytes for term in terms),
        resource=terms[-1].resource if terms else "device memory",
    )


def _waited_for(layer: LayerCost) -> list[Term]:
    """The terms on the critical path: of what runs side by side, the longer one."""
    behind: tuple[str, ...] = ()
    if layer.hidden:
        slower = _fetching(layer.terms) >= layer.terms["estimate"].seconds
        behind = ("estimate",) if slower else ("lookup", "fetch")
    return [term for name, term in layer.terms.items() if name not in behind]


def _fetching(terms: Mapping[str, Term]) -> float:
    """Seconds of what runs beside the estimate."""
    return sum(terms[name].seconds for name in ("lookup", "fetch") if name in terms)
