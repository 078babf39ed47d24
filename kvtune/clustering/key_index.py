"""What every searchable index of keys shares: its kind and parameters, its answer, its checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtune.errors import InputError, unknown

KINDS: dict[str, dict[str, int]] = {
    "flat": {},
    "ivf": {"nlist": 0, "nprobe": 8},
    "hnsw": {"M": 32, "efConstruction": 40, "efSearch": 128},
    "pq": {"subvectors": 2, "bits": 6},
    "kmeans": {"clusters": 0, "iterations": 10, "nprobe": 8},
}
"""Parameters of each kind and their defaults. 0 lists: √N; 0 clusters: one per 16 keys."""

SEARCH_PARAMETER = {"ivf": "nprobe", "hnsw": "efSearch", "kmeans": "nprobe"}
"""The parameter that trades cost for recall in an index already built."""

METRICS = ("inner_product", "l2")
TOKENS_PER_CLUSTER = 16
_HIGHEST = {"M": 512, "bits": 16}
_LOWEST = {"M": 2, "nlist": 0, "clusters": 0}


@dataclass(frozen=True)
class IndexSpec:
    """A kind of index, its metric and its whole set of parameters (make one with :meth:`of`).

    The metric is the inner product unless said otherwise: keys are not normalised, and attention ranks
    them by q·k.
    """

    kind: str
    metric: str = "inner_product"
    parameters: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, kind: str, parameters: Mapping[str, Any] | None = None, metric: str = "inner_product"
    ) -> IndexSpec:
        """Check and complete. Raises ``InputError`` for an unknown name or a value without sense."""
        if kind not in KINDS:
            raise unknown("kind of index", kind, KINDS)
        if metric not in METRICS:
            raise unknown("metric", metric, METRICS)
        if kind == "kmeans" and metric != "inner_product":
            raise InputError("a kmeans index ranks by inner product only")
        return cls(kind, metric, dict(KINDS[kind])).changed(parameters or {})

    def changed(self, parameters: Mapping[str, Any]) -> IndexSpec:
        """The same with some parameters replaced. Raises ``InputError`` as :meth:`of` does."""
        for name, value in parameters.items():
            if name not in self.parameters:
                if not self.parameters:
                    raise InputError(f"index kind '{self.kind}' has no parameters, so no '{name}'")
                raise unknown(f"parameter of index kind '{self.kind}'", name, self.parameters)
            low, high = _LOWEST.get(name, 1), _HIGHEST.get(name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or value < low or (high is not None and value > high):
                limit = f"{low} or more" if high is None else f"{low}…{high}"
                raise InputError(f"{name} of index kind '{self.kind}' must be {limit}, not '{value}'")
        return replace(self, parameters={**self.parameters, **parameters})

    def fitted(self, n: int, dim: int) -> IndexSpec:
        """The same with counts left to the index resolved for ``n`` keys of ``dim`` channels.

        Raises ``InputError`` where there are too few keys to train on, or ``dim`` does not divide.
        """
        p = self.parameters
        if n < 1:
            raise InputError("there are no keys to index")
        if self.kind == "ivf" and p["nlist"] == 0:
            return self.changed({"nlist": max(1, round(math.sqrt(n)))})
        if self.kind == "kmeans" and p["clusters"] == 0:
            return self.changed({"clusters": max(1, round(n / TOKENS_PER_CLUSTER))})
        for name in ("nlist", "clusters"):
            if p.get(name, 0) > n:
                raise InputError(
                    f"{name}={p[name]} of index kind '{self.kind}' needs at least {p[name]} keys to train; "
                    f"there are {n}",
                    f"lower {name} to {n} at most, or leave it out",
                )
        if self.kind == "pq":
            check_quantiser(n, dim, p["subvectors"], p["bits"])
        return self


def check_quantiser(n: int, dim: int, subvectors: int, bits: int) -> None:
    """Refuse a product quantiser that ``n`` keys of ``dim`` channels cannot train."""
    if dim % subvectors:
        raise InputError(
            f"a head dimension of {dim} does not divide into {subvectors} subvectors",
            f"use one of {', '.join(str(s) for s in range(1, dim + 1) if dim % s == 0)}",
        )
    if n < 1 << bits:
        enough = max(n, 1).bit_length() - 1
        raise InputError(
            f"a product quantiser of {bits} bits needs at least its {1 << bits} centroids' number of keys "
            f"to train; there are {n}",
            f"lower bits to {enough} at most" if enough else "index more keys",
        )


@dataclass(frozen=True)
class Found:
    """The answer to Q queries, best first.

    ids [Q, k] int64 (-1 where fewer were found), scores [Q, k] float32, higher is better (inner product,
    or minus the squared distance; -inf where absent), scan_bytes [Q] int64: index bytes read.
    """

    ids: NDArray[np.int64]
    scores: NDArray[np.float32]
    scan_bytes: NDArray[np.int64]


def as_rows(vectors: Tensor, what: str, dim: int | None = None) -> NDArray[np.float32]:
    """``vectors`` [N, d] of any floating dtype as contiguous float32 in the CPU's memory.

    Raises ``InputError`` for another shape, another ``dim``, or NaN or infinity (naming the first place).
    """
    if vectors.ndim != 2 or not vectors.is_floating_point():
        raise InputError(f"{what} vectors must be a floating-point tensor [N, d], not {list(vectors.shape)}")
    if dim is not None and vectors.shape[1] != dim:
        raise InputError(f"{what} vectors have {vectors.shape[1]} channels; the index has {dim}")
    rows = vectors.detach().float()
    if rows.numel() and not all(bool(torch.isfinite(end)) for end in torch.aminmax(rows)):
        row, channel = torch.nonzero(~torch.isfinite(rows))[0].tolist()
        bad = "NaN" if bool(torch.isnan(rows[row, channel])) else "infinite"
        raise InputError(f"{what} {row} is {bad} (channel {channel})")
    return rows.cpu().contiguous().numpy()
