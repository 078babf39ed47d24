"""The contract every retrieval, eviction or dense method fulfils (DESIGN: policy)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

from torch import Tensor

from kvtune.errors import InputError, unknown
from kvtune.geometry import PAGE_TOKENS, LayerInfo, ModelGeometry


@dataclass
class Clusters:
    """What the estimation zone reads: centroids [H, C, d], sizes [H, C], value sums [H, C, dv].

    ``mean_positions`` [H, C] serves position biases (ALiBi) only. ``spreads`` [H, C] float32, where weights
    are corrected for them: mean squared distance of a cluster's keys to its centroid.
    """

    centroids: Tensor
    sizes: Tensor
    value_sums: Tensor
    mean_positions: Tensor | None = None
    spreads: Tensor | None = None

    def stored_bytes(self, item_bytes: int) -> int:
        """Centroids and value sums at the model's precision, sizes (and spreads) of 4 bytes."""
        numbers = self.sizes.numel() * (4 if self.spreads is None else 8)
        return (self.centroids.numel() + self.value_sums.numel()) * item_bytes + numbers


@dataclass
class Selection:
    """What a policy attends at T steps, for the H kv heads of one layer.

    positions     [T, H, S] int64, exact tokens, each at most once, padded with -1 (anywhere)
    scan_bytes    [T, H] int64, bytes of index read to decide
    resident      how many leading columns of ``positions`` hold resident tokens (steady zone, dense
                  tail); the columns after them hold the retrieved tokens, which lie in ``blocks``.
                  ``None``: all are resident
    log_weights   [T, H, G, S] float32 added to the scores of ``positions`` (importance weights)
    estimated     [T, H, E] int64, clusters attended approximately, padded with -1
    clusters      the clusters ``estimated`` points into
    blocks        [T, H, B] int64, cacheable blocks (clusters, or 16-token position blocks) that hold
                  the retrieved part of ``positions``, in rank order (best first), padded with -1
    block_pages   [T, H, B] int64, pages of 8 tokens that each block has: what a cache holds and a miss
                  transfers, the same at every step (0 where padded)
    block_tokens  [T, H, B] int64, tokens of ``positions`` that lie in each block (0 where padded)
    touched_pages [T, H] int64, pages of the blocks that attention reads; ``None``: all of them
    truncated     [T, H] int64, blocks wanted but dropped because the execution buffer was full

    """

    positions: Tensor
    scan_bytes: Tensor
    resident: int | None = None
    log_weights: Tensor | None = None
    estimated: Tensor | None = None
    clusters: Clusters | None = None
    blocks: Tensor | None = None
    block_pages: Tensor | None = None
    block_tokens: Tensor | None = None
    touched_pages: Tensor | None = None
    truncated: Tensor | None = None

    def steps(self, part: slice) -> Selection:
        """The selection of some of the steps."""

        def cut(rows: Tensor | None) -> Tensor | None:
            return None if rows is None else rows[part]

        return Selection(
            positions=self.positions[part],
            scan_bytes=self.scan_bytes[part],
            resident=self.resident,
            log_weights=cut(self.log_weights),
            estimated=cut(self.estimated),
            clusters=self.clusters,
            blocks=cut(self.blocks),
            block_pages=cut(self.block_pages),
            block_tokens=cut(self.block_tokens),
            touched_pages=cut(self.touched_pages),
            truncated=cut(self.truncated),
        )

    def exact_tokens(self) -> Tensor:
        """Exact tokens attended, [T, H]."""
        return (self.positions >= 0).sum(-1)

    def pages(self) -> Tensor:
        """Pages of exact K and V read, [T, H]: resident tokens rounded up, plus the retrieved pages."""
        return (self._resident_tokens() + PAGE_TOKENS - 1) // PAGE_TOKENS + self._retrieved_pages()

    def effective_tokens(self) -> Tensor:
        """Resident tokens plus retrieved tokens after page rounding, [T, H]."""
        return self._resident_tokens() + PAGE_TOKENS * self._retrieved_pages()

    def _resident_tokens(self) -> Tensor:
        tokens = self.exact_tokens()
        return tokens if self.block_tokens is None else tokens - self.block_tokens.sum(-1)

    def _retrieved_pages(self) -> Tensor | int:
        if self.touched_pages is not None:
            return self.touched_pages
        return 0 if self.block_pages is None else self.block_pages.sum(-1)

    def read_bytes(self, layer: LayerInfo) -> Tensor:
        """Bytes one step reads from device memory, [T, H]: scan + estimation + exact pages.

        An estimated cluster's centroid is already part of the scan; it adds its value sum (model
        precision) and its size (4 bytes; its spread, where used, as many).
        """
        total = self.scan_bytes + self.pages() * layer.page_bytes
        if self.estimated is not None:
            numbers = 4 if self.clusters is None or self.clusters.spreads is None else 8
            total = total + (self.estimated >= 0).sum(-1) * (layer.value_dim * layer.item_bytes + numbers)
        return total


@dataclass(frozen=True)
class Policy(ABC):
    """A method with its parameters.

    Class attributes: ``name`` (command line and profiles), ``title``, ``source`` (paper or code),
    ``budget`` (the one monotone parameter that trades bytes for quality, or ``None``),
    ``evicts`` (true where a token not selected is lost for later steps).
    ``prompt_window`` is how many of the last prompt queries ``build`` wants (0: none).
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    budget: ClassVar[str | None] = None
    evicts: ClassVar[bool] = False

    @property
    def prompt_window(self) -> int:
        return 0

    def build_key(self) -> tuple[Any, ...]:
        """What :meth:`build` and :meth:`append` depend on: policies that share it may share an index."""
        return tuple(self.parameters().values())

    @abstractmethod
    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> Any:
        """Index the prompt of one layer.

        keys [H, N, d], values [H, N, dv] at positions 0…N-1, prompt_queries [H, G, W, d] (the last W ≤
        ``prompt_window`` prompt positions, W may be 0), all on one device and of the model's precision.
        Deterministic on CPU.
        """

    @abstractmethod
    def select(self, index: Any, queries: Tensor, positions: Tensor) -> Selection:
        """Choose tokens for T steps at once. queries [T, H, G, d], positions [T] (int64, ascending).

        A query at position p may see every appended key at positions ≤ p, its own included. T steps at
        once give the same as T single steps, provided the keys up to each position were appended.
        """

    @abstractmethod
    def append(self, index: Any, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Add keys [H, M, d] and values [H, M, dv] at positions [M] that follow those present."""

    def index_bytes(self, index: Any, layer: LayerInfo) -> int:
        """Bytes of ``index`` over all kv heads, as an engine would store it (default: the method has none).

        What the method adds to the cache: centroids, bounds, codes, tables; not the keys and values
        themselves, nor the order in which they lie.
        """
        return 0

    @classmethod
    @abstractmethod
    def lossless(cls, n: int) -> dict[str, Any] | None:
        """Parameters at which the method equals full attention on n tokens; ``None`` if there are none."""

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        """Parameters suggested by an Optuna trial (default: none to search)."""
        return {}

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Self:
        """Build from a plain mapping; unknown names and unconvertible values are ``InputError``."""
        known = {f.name: f for f in fields(cls)}
        converted = {}
        for key, value in parameters.items():
            if key not in known:
                raise unknown(f"parameter of policy '{cls.name}'", key, known)
            converted[key] = _convert(cls.name, key, value, known[key].default)
        return cls(**converted)

    def parameters(self) -> dict[str, Any]:
        """Plain mapping that :meth:`from_parameters` inverts."""
        return asdict(self)


def _convert(policy: str, key: str, value: Any, default: Any) -> Any:
    """Bring ``value`` (often text from the command line) to the type of the parameter's default."""
    try:
        if isinstance(default, bool):
            if isinstance(value, bool):
                return value
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        if isinstance(default, int):
            if float(value) != int(float(value)):
                raise ValueError
            return int(float(value))
        if isinstance(default, float):
            return float(value)
        return type(default)(value) if default is not None else value
    except (TypeError, ValueError, KeyError, OverflowError):
        wanted = type(default).__name__
        raise InputError(f"parameter '{key}' of policy '{policy}' must be {wanted}, not '{value}'") from None


def check(condition: bool, policy: Policy, message: str) -> None:
    """Refuse a parameter value in one sentence."""
    if not condition:
        raise InputError(f"policy '{policy.name}': {message}")
