"""A machine as the cost model sees it: sizes, bandwidths, latencies, and where each number comes from.

Bytes per second count bytes read and bytes written alike: a copy of n bytes moves 2n. Strict and versioned;
``kvtune.hardware.files`` reads and writes it as YAML.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

VERSION = 1
"""Format version written, and the newest that is read."""

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]

StageName = Literal[
    "scan", "choose", "id_copy", "estimate", "lookup", "fetch", "attend", "update", "append", "full"
]


class Strict(BaseModel):
    """Base of all parts: exact types, no unknown keys, no NaN, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Source(Strict):
    """Where the numbers come from. ``assumed`` lists the keys for which there is only an assumption."""

    kind: Literal["measured", "data sheet"]
    date: Text | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    document: Text | None = None
    note: Text | None = None
    assumed: tuple[Text, ...] = ()

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.kind == "measured" and not (self.date and self.versions):
            raise ValueError("what was measured has a date and versions")
        if self.kind == "data sheet" and not self.document:
            raise ValueError("a data sheet is named under 'document'")
        return self


class GatherRate(Strict):
    """Rows of ``row_bytes`` at random places."""

    row_bytes: Count
    bytes_per_second: Rate


class DeviceMemory(Strict):
    """Memory that attention reads: the GPU's, or the host's where there is no GPU.

    ``weights_bytes_per_second``: weights as the products of one token with them read them (``None``: as
    ``read_bytes_per_second``).
    """

    bytes: Count
    read_bytes_per_second: Rate
    copy_bytes_per_second: Rate
    weights_bytes_per_second: Rate | None = None
    gather: tuple[GatherRate, ...] = ()


class TransferRate(Strict):
    """One transfer of ``bytes``, its latency included."""

    bytes: Count
    bytes_per_second: Rate


class Link(Strict):
    """Host to device (PCIe), by size of the transfer, ascending."""

    pinned: Annotated[tuple[TransferRate, ...], Field(min_length=1)]
    pageable: tuple[TransferRate, ...] = ()

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        for name, rates in (("pinned", self.pinned), ("pageable", self.pageable)):
            sizes = [rate.bytes for rate in rates]
            if sizes != sorted(set(sizes)):
                raise ValueError(f"{name} transfers must ascend in size, each once")
        return self


class Host(Strict):
    """Memory of the host: its size, and the rate of a copy within it."""

    memory_bytes: Count | None = None
    copy_bytes_per_second: Rate | None = None


class Disk(Strict):
    """Sequential reads."""

    read_bytes_per_second: Rate


class Launch(Strict):
    """What starting work costs, in microseconds.

    ``kernel_us``: one kernel from Python, back to back with others; ``graph_node_us``: one node of a CUDA
    graph (``None``: no graphs); ``layer_overhead_us``: a decoder layer without its attention and its weights'
    bytes (norms, rotary positions, residuals, activation, starting its products) at one token, and
    ``step_overhead_us`` what a step has beside its layers (embedding, last norm, output layer's start), both
    as transformers writes them, in a graph where there are graphs.
    """

    kernel_us: NonNegative
    graph_node_us: NonNegative | None = None
    layer_overhead_us: NonNegative
    step_overhead_us: NonNegative


class Stage(Strict):
    """Fitted time of one stage: ``fixed_us + bytes / bytes_per_second + entries · ns_per_entry``.

    ``bytes_per_second`` is ``None`` where bytes do not matter; ``entries`` are what one kv head of one
    sequence works through in order. ``samples`` were fitted, the worst is off by ``worst_error`` of itself.
    """

    fixed_us: NonNegative = 0.0
    bytes_per_second: Rate | None = None
    ns_per_entry: NonNegative = 0.0
    samples: Count | None = None
    worst_error: NonNegative | None = None

    def seconds(self, n_bytes: float, entries: float = 0.0) -> float:
        """Time of one call."""
        return self.latency(entries) + (n_bytes / self.bytes_per_second if self.bytes_per_second else 0.0)

    def latency(self, entries: float = 0.0) -> float:
        """The part of a call's time that its bytes have no share in, in seconds."""
        return self.fixed_us * 1e-6 + entries * self.ns_per_entry * 1e-9


class Stages(Strict):
    """The sparse decode step on this machine, stage by stage; one not fitted follows the bandwidths.

    scan      read the index and score it
    choose    rank it, choose what is retrieved and estimated
    id_copy   list the chosen blocks: their numbers for the lookup, their rows for the attention
    estimate  read value sums and sizes of the estimated clusters
    lookup    find the chosen blocks in the cache
    fetch     missed pages over PCIe
    attend    attention over exact rows, and the merge
    update    missed pages into the cache
    append    the new token's key and value into their place
    full      full attention of a dense layer

    ``estimation`` says where estimates are made: ``beside_fetch`` (they hide behind lookup and fetch, or
    these behind them) or ``in_attend`` (the attention kernel reads them at its own rate; its samples count
    their bytes).
    """

    estimation: Literal["beside_fetch", "in_attend"] = "beside_fetch"
    scan: Stage | None = None
    choose: Stage | None = None
    id_copy: Stage | None = None
    estimate: Stage | None = None
    lookup: Stage | None = None
    fetch: Stage | None = None
    attend: Stage | None = None
    update: Stage | None = None
    append: Stage | None = None
    full: Stage | None = None

    def get(self, name: str) -> Stage | None:
        """The fitted stage called ``name``, if there is one."""
        stage: Stage | None = getattr(self, name)
        return stage


class Hardware(Strict):
    """One machine. ``name`` is what the command line calls it, ``device`` the device's own title.

    ``matmul_flops_per_second`` is that of a large 16-bit matrix product, a multiplication and an addition
    counted as two.
    """

    kvtune_hardware: Literal[1] = 1
    name: Text
    device: Text
    source: Source
    device_memory: DeviceMemory
    host_to_device: Link | None = None
    host: Host = Host()
    disk: Disk | None = None
    launch: Launch
    matmul_flops_per_second: Rate
    stages: Stages = Stages()

    def gather_rate(self, row_bytes: float) -> float:
        """Bytes per second of rows at random places: as for the size nearest, else as a sequential read."""
        rates = self.device_memory.gather
        if not rates:
            return self.device_memory.read_bytes_per_second
        return min(rates, key=lambda rate: _distance(rate.row_bytes, row_bytes)).bytes_per_second

    def transfer_seconds(self, n_bytes: float) -> float:
        """Time of one pinned transfer to the device, never falling with its size.

        Linear between the measured sizes; below the smallest and above the largest at their rates.
        Raises ``ValueError`` where there is no link.
        """
        if self.host_to_device is None:
            raise ValueError(f"{self.name} has no link between host and device")
        size, seconds = 0.0, 0.0
        for rate in self.host_to_device.pinned:
            end = max(seconds, rate.bytes / rate.bytes_per_second)
            if n_bytes <= rate.bytes:
                return seconds + (end - seconds) * (n_bytes - size) / (rate.bytes - size)
            size, seconds = rate.bytes, end
        return seconds + (n_bytes - size) / rate.bytes_per_second

    @property
    def node_seconds(self) -> float:
        """Starting one more kernel: a node of a CUDA graph, or a launch where there are no graphs."""
        graphed = self.launch.graph_node_us
        return (self.launch.kernel_us if graphed is None else graphed) * 1e-6


def _distance(a: float, b: float) -> float:
    """How many times larger one size is than the other."""
    return max(a, b) / max(min(a, b), 1.0)
