"""kvtune's own k-means clusters as a searchable index: the best clusters by centroid, their keys exactly."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvtune.clustering import members, segmented_kmeans
from kvtune.clustering.key_index import Found, IndexSpec, as_rows
from kvtune.errors import InputError
from kvtune.policies.layout import cluster_tokens

_BATCH = 16
_ID_BYTES = 4


class KMeansIndex:
    """Spherical k-means (one segment, plain means at the end) of keys [N, d]; ids are rows 0…N-1.

    Searched like an inverted file: the ``nprobe`` non-empty clusters of largest q·centroid, every key of
    them by exact inner product. ``scan_bytes``: all centroids, and the keys and 4-byte ids read. The
    clusters are those of the wave index, so that its recall can be compared with Faiss's.
    """

    def __init__(
        self,
        spec: IndexSpec,
        item_bytes: int,
        centroids: Tensor,
        keys: Tensor,
        order: Tensor,
        offsets: Tensor,
    ) -> None:
        self.spec = spec
        self.item_bytes = item_bytes
        self.notes: list[str] = []
        self._centroids = centroids
        self._keys = keys
        self._order = order
        self._offsets = offsets

    @classmethod
    def build(
        cls, keys: Tensor, spec: IndexSpec, device: str | torch.device = "cpu", seed: int = 0
    ) -> KMeansIndex:
        """Cluster keys [N, d] of any floating dtype on ``device`` (``seed`` has no part: starts are strided).

        Raises ``InputError`` for NaN or infinite keys, or fewer keys than clusters.
        """
        as_rows(keys, "key")
        spec = spec.fitted(len(keys), keys.shape[1])
        rows = keys.to(device)[None]
        clusters, iterations = spec.parameters["clusters"], spec.parameters["iterations"]
        found = segmented_kmeans(rows, clusters, 1, iterations)
        order, offsets = members(found.assignment, found.sizes)
        return cls(
            spec,
            keys.element_size(),
            centroids=found.centroids[0],
            keys=rows[0].float(),
            order=order[0],
            offsets=offsets[0],
        )

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def dim(self) -> int:
        return self._keys.shape[1]

    def structure_bytes(self) -> int:
        """Bytes that the index adds to the keys: centroids, sizes and ids."""
        clusters = len(self._centroids)
        return clusters * (self.dim * self.item_bytes + _ID_BYTES) + len(self) * _ID_BYTES

    def search(self, queries: Tensor, k: int, changes: Mapping[str, int] | None = None) -> Found:
        """The ``k`` best keys in the probed clusters for queries [Q, d] (``nprobe`` may be changed)."""
        if k < 1:
            raise InputError(f"an index is asked for 1 neighbour or more, not {k}")
        rows = torch.from_numpy(as_rows(queries, "query", self.dim)).to(self._keys.device)
        nprobe = self.spec.changed(changes or {}).parameters["nprobe"]
        parts = [self._batch(rows[at : at + _BATCH], k, nprobe) for at in range(0, len(rows), _BATCH)]
        if not parts:
            return Found(np.zeros((0, k), np.int64), np.zeros((0, k), np.float32), np.zeros(0, np.int64))
        ids, scores, scanned = (torch.cat(columns).cpu().numpy() for columns in zip(*parts))
        return Found(ids, scores, scanned)

    def _batch(self, rows: Tensor, k: int, nprobe: int) -> tuple[Tensor, Tensor, Tensor]:
        sizes = self._offsets.diff()
        near = (rows @ self._centroids.T).masked_fill(sizes == 0, -torch.inf)
        probed = torch.topk(near, min(nprobe, int((sizes > 0).sum())), dim=1).indices
        tokens = cluster_tokens(probed[:, None], self._order[None], self._offsets[None])[:, 0]
        scores = torch.einsum("qd,qwd->qw", rows, self._keys[tokens.clamp_min(0)])
        scores = scores.masked_fill(tokens < 0, -torch.inf)
        best, column = torch.topk(scores, min(k, scores.shape[1]), dim=1)
        ids = torch.gather(tokens, 1, column)
        missing = k - ids.shape[1]
        vector = self.dim * self.item_bytes
        scanned = len(sizes) * vector + sizes[probed].sum(1) * (vector + _ID_BYTES)
        pad = torch.nn.functional.pad
        return pad(ids, (0, missing), value=-1), pad(best, (0, missing), value=-torch.inf), scanned

    def save(self, path: Path) -> None:
        """Write the arrays to ``path`` as a NumPy archive (no pickle)."""
        arrays = {name: getattr(self, f"_{name}").cpu().numpy() for name in _ARRAYS}
        with path.open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path, spec: IndexSpec, item_bytes: int) -> KMeansIndex:
        """Read what :meth:`save` wrote, onto the CPU. Raises ``InputError`` naming a file that is not one."""
        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: torch.from_numpy(archive[name]) for name in _ARRAYS}
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
            raise InputError(f"'{path}' is not a k-means index", "build it again") from None
        return cls(spec, item_bytes, **arrays)


_ARRAYS = ("centroids", "keys", "order", "offsets")
