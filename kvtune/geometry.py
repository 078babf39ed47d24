"""The shape of a model's attention: what a trace, a policy and a cost model need to know of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
PAGE_TOKENS = 8
"""Tokens per physical page (RetroInfer's ``cache_unit_size``): 8 keys and their 8 values."""


@dataclass(frozen=True)
class LayerInfo:
    """One attention layer as a policy sees it.

    ``scaling`` multiplies q·k; ``window`` is the sliding window in tokens (``None``: full attention);
    ``softcap`` caps the scaled logits; ``sinks`` and ``alibi`` hold one value per query head.
    """

    layer: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    scaling: float
    item_bytes: int = 2
    window: int | None = None
    softcap: float | None = None
    sinks: tuple[float, ...] | None = None
    alibi: tuple[float, ...] | None = None

    @property
    def group(self) -> int:
        """Query heads per kv head; query head h reads kv head ``h // group``."""
        return self.n_heads // self.n_kv_heads

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value in one kv head."""
        return (self.head_dim + self.value_dim) * self.item_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page (8 keys and 8 values) in one kv head."""
        return PAGE_TOKENS * self.token_bytes


@dataclass(frozen=True)
class ModelGeometry:
    """Layers, heads, dimensions and per-layer attention features of a model.

    ``windows``, ``softcaps``, ``sinks`` have one entry per layer. ``rope`` is the resolved rope
    configuration (a plain dict, e.g. ``{"rope_type": "yarn", "factor": 4.0, ...}``).
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    max_positions: int
    scaling: float
    windows: tuple[int | None, ...]
    softcaps: tuple[float | None, ...]
    sinks: tuple[bool, ...]
    alibi: bool = False
    rope: dict[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> int:
        return self.n_heads // self.n_kv_heads

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token over all layers and kv heads."""
        return self.n_layers * self.n_kv_heads * (self.head_dim + self.value_dim) * self.item_bytes

    def layer(self, index: int) -> LayerInfo:
        """The :class:`LayerInfo` of layer ``index`` (sink and ALiBi values are the model's)."""
        return LayerInfo(
            layer=index,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            scaling=self.scaling,
            item_bytes=self.item_bytes,
            window=self.windows[index],
            softcap=self.softcaps[index],
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready form; :meth:`from_dict` inverts it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelGeometry:
        lists = {key: tuple(data[key]) for key in ("windows", "softcaps", "sinks")}
        return cls(**{**data, **lists})
