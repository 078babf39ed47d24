"""The hot steps of k-means on CUDA, in Triton: fused assignment, sort by cluster, segment means.

Sums are float32 and scores stay in registers. The global pass has products of 16-bit operands. Passes within
segments only steer where centroids settle: from the second on (centroids are unit vectors then) they have
8-bit operands (e4m3), each key by a scale of its own, at twice the rate; the inertia reached is the same
(benchmarks/kmeans_gpu.py). Per pass and key the device reads the key twice (assignment, means), and writes 4
bytes each of assignment, rank and order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvtune.clustering import kmeans_kernels as kernels

NARROW_FROM = 4096
"""Tokens of a segment from which its passes have 8-bit operands: below, launches are what takes time."""
GAIN = 16.0
"""Unit centroids are stored at 8 bits times this, which keeps items from 1e-4 to 28 apart from zero."""
_NARROW = torch.float8_e4m3fn


@dataclass(frozen=True)
class Tiles:
    """Launch shape of the assignment: keys and centroids per tile, warps, tiles of centroids in flight."""

    keys: int = 128
    centroids: int = 64
    warps: int = 4
    stages: int = 3


WIDE = Tiles()
NARROW = Tiles(stages=4)


@dataclass(frozen=True)
class Means:
    """Launch shape of the means: clusters of a program, rows of each fetched at a time, warps."""

    together: int = 4
    rows: int = 8
    warps: int = 1


MEANS = Means()


def supports(keys: Tensor) -> bool:
    """Whether the device has a tensor copy engine (Hopper on), and rows are aligned and fit on chip."""
    if keys.is_cuda and torch.cuda.get_device_capability(keys.device) < (9, 0):
        return False
    return keys.shape[-1] % 8 == 0 and keys.shape[-1] <= 256


def refine(keys: Tensor, mean: Tensor, centroids: Tensor, n_segments: int, passes: int) -> Tensor:
    """``passes`` × (assign, move to the mean, normalise) within each segment of N // n_segments tokens.

    keys [H, N, d], mean [H, 1, d] float32, centroids [H, C, d] float32 → centroids [H, C, d] float32.
    """
    keys = _loadable(keys)
    problems = Problems(keys, mean, centroids.shape[1], n_segments)
    wide = WideKeys(problems, keys, centroids.to(product_dtype(keys)).contiguous())
    if passes < 3 or problems.length < NARROW_FROM or keys.shape[2] % 16:
        for _ in range(passes):
            wide.step(wide)
        return wide.centroids.float()
    narrow = NarrowKeys(problems, keys)
    wide.step(narrow)
    for _ in range(passes - 2):
        narrow.step(narrow)
    narrow.step(wide)
    return wide.centroids.float()


def assign(keys: Tensor, mean: Tensor, centroids: Tensor) -> Tensor:
    """Best centroid by inner product with the centred keys: [H, N, d], [H, C, d] → [H, N] int64."""
    keys = _loadable(keys)
    problems = Problems(keys, mean, centroids.shape[1], 1)
    WideKeys(problems, keys, centroids.to(product_dtype(keys)).contiguous()).assign()
    return problems.assignment.long()


def cluster_sums(values: Tensor, assignment: Tensor, sizes: Tensor) -> Tensor:
    """Float32 sum of each cluster: [H, N, dv], [H, N] int64, [H, C] int64 → [H, C, dv]."""
    values = values.contiguous()
    heads, n, width = values.shape
    n_centroids = sizes.shape[1]
    counts = torch.zeros(sizes.shape, dtype=torch.int32, device=values.device)
    ranks = torch.empty(assignment.shape, dtype=torch.int32, device=values.device)
    kernels.rank_kernel[(triton.cdiv(n, 1024), heads)](
        assignment, counts, ranks, n, n_centroids, BLOCK=1024, num_warps=8
    )
    order, ends = sort_by_cluster(assignment, ranks, counts)
    sums = torch.empty(heads, n_centroids, width, dtype=torch.float32, device=values.device)
    kernels.sum_kernel[(triton.cdiv(n_centroids, MEANS.together), heads)](
        values, order, ends, counts, sums, n, n_centroids, width,
        TOGETHER=MEANS.together, DIM=triton.next_power_of_2(width), ROWS=MEANS.rows, num_warps=MEANS.warps,
    )  # fmt: skip
    return sums


class Problems:
    """Independent k-means problems, one a segment, with the buffers their passes share."""

    def __init__(self, keys: Tensor, mean: Tensor, n_centroids: int, n_segments: int) -> None:
        heads, self.stride, self.dim = keys.shape
        self.mean = mean.contiguous()
        self.segments, self.length = n_segments, self.stride // n_segments
        self.count, self.width = heads * n_segments, n_centroids // n_segments
        self.assignment = torch.empty(self.count, self.length, dtype=torch.int32, device=keys.device)
        self.ranks = torch.empty_like(self.assignment)
        self.sizes = torch.zeros(self.count, self.width, dtype=torch.int32, device=keys.device)


class _Operands:
    """Keys [H, N, d] and centroids [H, C, d] as the kernels read them.

    ``scales`` [H, N] belong to keys that are centred already; ``gain``: what centroids are multiplied by.
    """

    def __init__(
        self, problems: Problems, keys: Tensor, centroids: Tensor, scales: Tensor | None, gain: float
    ) -> None:
        self.problems, self.keys, self.centroids = problems, keys, centroids
        self.scales, self.gain = scales, gain
        # A product takes 16 bytes of a row at a time, 32 items of them at 8 bits.
        self.padded = max(16 if scales is None else 32, triton.next_power_of_2(problems.dim))
        self.use(WIDE if scales is None else NARROW)

    def use(self, tiles: Tiles) -> None:
        """Set the launch shape of the assignment."""
        self.tiles = replace(tiles, keys=tiles.keys // 2) if self.padded > 128 else tiles
        self._key_tiles = TensorDescriptor.from_tensor(
            self.keys.flatten(0, 1), [self.tiles.keys, self.padded]
        )
        self._centroid_tiles = TensorDescriptor.from_tensor(
            self.centroids.view(-1, self.problems.dim), [self.tiles.centroids, self.padded]
        )

    def step(self, following: _Operands) -> None:
        """One pass; the centroids moved go to ``following`` (these operands themselves, or others)."""
        self.assign()
        self.move(following)

    def assign(self) -> None:
        """Fill the problems' ``assignment``, ``ranks`` and ``sizes`` (zero before)."""
        of, tiles = self.problems, self.tiles
        kernels.assign_kernel[(triton.cdiv(of.length, tiles.keys), of.count)](
            self._key_tiles, of.mean, self._centroid_tiles, of.assignment, of.ranks, of.sizes,
            of.stride, of.length, of.segments, of.width, of.dim,
            KEYS=tiles.keys, CENTROIDS=tiles.centroids, DIM=self.padded, STAGES=tiles.stages,
            CENTRED=self.scales is not None, num_warps=tiles.warps,
        )  # fmt: skip

    def move(self, following: _Operands, means: Means | None = None) -> None:
        """Centroids become the normalised means of their keys, in ``following``; ``sizes`` zero again."""
        means = means or MEANS
        of = self.problems
        order, ends = sort_by_cluster(of.assignment, of.ranks, of.sizes)
        kernels.move_kernel[(triton.cdiv(of.width, means.together), of.count)](
            self.keys, self.keys if self.scales is None else self.scales, of.mean, order, ends, of.sizes,
            self.centroids, following.centroids, self.gain, following.gain,
            of.stride, of.length, of.segments, of.width, of.dim,
            TOGETHER=means.together, DIM=self.padded, ROWS=means.rows, SCALED=self.scales is not None,
            ROUNDED=following.scales is not None, num_warps=means.warps,
        )  # fmt: skip


class WideKeys(_Operands):
    """Keys as they are, centred when loaded, and 16-bit centroids."""

    def __init__(self, problems: Problems, keys: Tensor, centroids: Tensor) -> None:
        super().__init__(problems, keys, centroids, None, 1.0)


class NarrowKeys(_Operands):
    """Keys centred and at 8 bits, and 8-bit centroids still to be filled."""

    def __init__(self, problems: Problems, keys: Tensor) -> None:
        heads, n, dim = keys.shape
        narrow = torch.empty(keys.shape, dtype=_NARROW, device=keys.device)
        scales = torch.empty(heads, n, dtype=torch.float32, device=keys.device)
        rows, padded = 64, triton.next_power_of_2(dim)
        kernels.quantise_kernel[(triton.cdiv(n, rows), heads)](
            keys, problems.mean, narrow, scales, n, dim, DIM=padded, ROWS=rows, num_warps=8
        )
        n_centroids = problems.width * problems.segments
        centroids = torch.empty(heads, n_centroids, dim, dtype=_NARROW, device=keys.device)
        super().__init__(problems, narrow, centroids, scales, GAIN)


def _loadable(keys: Tensor) -> Tensor:
    return (keys.float() if keys.dtype == torch.float64 else keys).contiguous()


def product_dtype(keys: Tensor) -> torch.dtype:
    """The 16-bit type of the products with ``keys``."""
    return torch.float16 if keys.dtype == torch.float16 else torch.bfloat16


def sort_by_cluster(assignment: Tensor, ranks: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens grouped by cluster: assignment and ranks [B, n], sizes [B, c] → order [B, n], ends [B, c]."""
    batch, n = assignment.shape
    order = torch.empty(batch, n, dtype=torch.int32, device=assignment.device)
    ends = sizes.cumsum(1, dtype=torch.int32)
    kernels.place_kernel[(triton.cdiv(n, 1024), batch)](
        assignment, ranks, ends, order, n, sizes.shape[1], BLOCK=1024, num_warps=4
    )
    return order, ends
