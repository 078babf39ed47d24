"""Faiss, well behaved: one class over its flat, IVF, HNSW and product-quantised indexes of keys."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch  # before faiss: the first to load brings the OpenMP and CUDA libraries both use
from numpy.typing import NDArray
from torch import Tensor

from kvtune.clustering.key_index import Found, IndexSpec, as_rows, check_quantiser
from kvtune.errors import InputError

GPU_MOST_RESULTS = 2048
"""Faiss answers at most so many neighbours per query on a GPU."""
_ON_GPU = ("flat", "ivf")
_ADVISED_PER_LIST = 39
_BATCH = 16
"""Queries searched at once. From 20 on, Faiss multiplies matrices, and a query's scores would depend on its
company in the last bits."""
_ID_BYTES = 4


def load_faiss() -> Any:
    """The faiss module. Raises ``InputError`` with the way to install it where it is missing."""
    try:
        import faiss
    except ImportError:
        hint = "pip install 'kvtune[cpu]' (or 'kvtune[gpu]')"
        raise InputError("this needs Faiss, which is not installed", hint) from None
    return faiss


class FaissIndex:
    """An index of keys [N, d] that answers with row numbers 0…N-1.

    Deterministic on a CPU: built by one thread, seeded. ``notes`` says what was adapted. ``scan_bytes``
    counts vectors at ``item_bytes`` per channel, 4 bytes per id of an inverted list or link of a graph.
    Searches of one process must not overlap: Faiss counts an HNSW search in a global.
    """

    def __init__(self, index: Any, spec: IndexSpec, item_bytes: int, notes: list[str] | None = None) -> None:
        self.spec = spec
        self.item_bytes = item_bytes
        self.notes = notes or []
        self._faiss = load_faiss()
        self._index = index
        self._resources: Any = None
        self._sizes: NDArray[np.int64] | None = None

    @classmethod
    def build(
        cls,
        keys: Tensor,
        spec: IndexSpec,
        device: str | torch.device = "cpu",
        seed: int = 0,
        item_bytes: int | None = None,
    ) -> FaissIndex:
        """Index keys [N, d] of any floating dtype (``item_bytes``: that of the dtype).

        ``device`` is ``cpu`` or one GPU; where Faiss cannot use the GPU, a note says so. Raises
        ``InputError`` for NaN or infinite keys, too few of them, or a device that is not there.
        """
        faiss = load_faiss()
        rows = as_rows(keys, "key")
        spec = spec.fitted(len(rows), rows.shape[1])
        made = cls(_empty(faiss, spec, rows.shape[1], seed), spec, item_bytes or keys.element_size())
        made._place(torch.device(device))
        if spec.kind == "ivf" and len(rows) < _ADVISED_PER_LIST * spec.parameters["nlist"]:
            made.notes.append(
                f"{len(rows)} keys train {spec.parameters['nlist']} lists; Faiss advises "
                f"{_ADVISED_PER_LIST} per list"
            )
        with _one_thread(faiss):
            made._index.train(rows)
            made._index.add(rows)
        return made

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def dim(self) -> int:
        return int(self._index.d)

    def structure_bytes(self) -> int:
        """Bytes that the index adds to the keys: centroids and ids, links, or codes and codebook."""
        n, p = len(self), self.spec.parameters
        if self.spec.kind == "ivf":
            return int(self._index.nlist) * self.dim * self.item_bytes + n * _ID_BYTES
        if self.spec.kind == "hnsw":
            return int(self._index.hnsw.neighbors.size()) * _ID_BYTES
        if self.spec.kind == "pq":
            return n * int(self._index.pq.code_size) + (1 << p["bits"]) * self.dim * self.item_bytes
        return 0

    def search(self, queries: Tensor, k: int, changes: Mapping[str, int] | None = None) -> Found:
        """The ``k`` best keys for queries [Q, d]; ``changes`` replaces parameters of this search.

        nprobe counts lists that hold keys, and above nlist means all; an efSearch below ``k`` acts as ``k``,
        as in Faiss. More than 2,048 results from a GPU are searched for on the CPU, and a note says so.
        """
        if k < 1:
            raise InputError(f"an index is asked for 1 neighbour or more, not {k}")
        rows = as_rows(queries, "query", self.dim)
        parameters = self.spec.changed(changes or {}).parameters
        if self._resources is not None and k > GPU_MOST_RESULTS:
            self._to_cpu()
            self.notes.append(f"{k} neighbours exceed a GPU's {GPU_MOST_RESULTS}: the CPU searches")
        size = 1 if self.spec.kind == "hnsw" else _BATCH
        parts = [self._batch(rows[at : at + size], k, parameters) for at in range(0, len(rows), size)]
        if not parts:
            return Found(np.zeros((0, k), np.int64), np.zeros((0, k), np.float32), np.zeros(0, np.int64))
        scores, ids, scanned = (np.concatenate(columns) for columns in zip(*parts))
        scores = scores if self.spec.metric == "inner_product" else -scores
        return Found(ids, np.where(ids < 0, np.float32(-np.inf), scores), scanned)

    def save(self, path: Path) -> None:
        """Write the index to ``path`` in Faiss's own format."""
        index = self._index if self._resources is None else self._faiss.index_gpu_to_cpu(self._index)
        self._faiss.write_index(index, os.fspath(path))

    @classmethod
    def load(cls, path: Path, spec: IndexSpec, item_bytes: int) -> FaissIndex:
        """Read what :meth:`save` wrote, onto the CPU. Raises ``InputError`` naming a file that is not one."""
        faiss = load_faiss()
        try:
            index = faiss.read_index(os.fspath(path))
        except RuntimeError:
            raise InputError(f"'{path}' is not a Faiss index", "build it again") from None
        return cls(index, spec, item_bytes)

    def _place(self, device: torch.device) -> None:
        """Move the empty index to a GPU where one is asked for and can hold it."""
        faiss = self._faiss
        if device.type == "cpu":
            return
        if not hasattr(faiss, "StandardGpuResources"):
            self.notes.append("this Faiss is built for the CPU: the index lies there")
        elif self.spec.kind not in _ON_GPU:
            self.notes.append(f"Faiss has no {self.spec.kind} index for a GPU: it lies on the CPU")
        else:
            number = device.index or 0
            if number >= faiss.get_num_gpus():
                raise InputError(f"device '{device}' is not available to Faiss", "use --device cpu")
            self._resources = faiss.StandardGpuResources()
            self._index = faiss.index_cpu_to_gpu(self._resources, number, self._index)

    def _to_cpu(self) -> None:
        self._index = self._faiss.index_gpu_to_cpu(self._index)
        self._resources = None

    def _batch(
        self, rows: NDArray[np.float32], k: int, parameters: Mapping[str, int]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
        """Faiss's own distances and ids [q, k], and bytes scanned [q]."""
        if self.spec.kind == "ivf":
            return self._search_lists(rows, k, parameters["nprobe"])
        if self.spec.kind == "hnsw":
            return self._walk_graph(rows, k, parameters)
        return *self._index.search(rows, k), np.full(len(rows), self._whole_scan())

    def _search_lists(self, rows: NDArray[np.float32], k: int, nprobe: int) -> Any:
        """Probe the ``nprobe`` best lists that hold keys (on a GPU: the best lists, empty or not)."""
        index, sizes = self._index, self._list_sizes()
        index.nprobe = probed = min(nprobe, index.nlist)
        empty = 0 if self._resources is not None else int((sizes == 0).sum())
        coarse, lists = index.quantizer.search(rows, min(probed + empty, index.nlist))
        if empty:
            best = np.argsort(sizes[lists] == 0, axis=1, kind="stable")[:, :probed]
            coarse, lists = np.take_along_axis(coarse, best, 1), np.take_along_axis(lists, best, 1)
        vector = self.dim * self.item_bytes
        read = np.where(lists < 0, 0, sizes[lists]).sum(1)
        scanned = index.nlist * vector + read * (vector + _ID_BYTES)
        if self._resources is not None:
            return *index.search(rows, k), scanned
        return *index.search_preassigned(rows, k, lists, coarse), scanned

    def _walk_graph(self, rows: NDArray[np.float32], k: int, parameters: Mapping[str, int]) -> Any:
        """One query: every key compared is read, and the 2·M links of every node expanded."""
        faiss = self._faiss
        faiss.cvar.hnsw_stats.reset()
        wanted = faiss.SearchParametersHNSW(efSearch=parameters["efSearch"])
        scores, ids = self._index.search(rows, k, params=wanted)
        stats = faiss.cvar.hnsw_stats
        links = stats.nhops * 2 * parameters["M"] * _ID_BYTES
        return scores, ids, np.array([stats.ndis * self.dim * self.item_bytes + links], np.int64)

    def _whole_scan(self) -> int:
        if self.spec.kind == "flat":
            return len(self) * self.dim * self.item_bytes
        return self.structure_bytes()

    def _list_sizes(self) -> NDArray[np.int64]:
        if self._sizes is None:
            index = self._index
            size = index.invlists.list_size if self._resources is None else index.getListLength
            self._sizes = np.array([size(number) for number in range(index.nlist)], np.int64)
        return self._sizes


def faiss_kmeans(
    keys: Tensor, clusters: int, iterations: int = 10, seed: int = 0, spherical: bool = False
) -> tuple[Tensor, Tensor]:
    """Faiss's k-means of keys [N, d]: centroids [C, d] float32 and the cluster of each key [N] int64.

    On the CPU, by one thread; all keys train (Faiss would sample 256 per cluster). Raises ``InputError``
    where there are fewer keys than clusters, or a key is NaN or infinite.
    """
    faiss = load_faiss()
    rows = as_rows(keys, "key")
    if not 1 <= clusters <= len(rows):
        raise InputError(f"{len(rows)} keys cannot form {clusters} clusters")
    with _one_thread(faiss):
        kmeans = faiss.Kmeans(
            rows.shape[1],
            clusters,
            niter=iterations,
            seed=seed,
            spherical=spherical,
            min_points_per_centroid=1,
            max_points_per_centroid=len(rows),
        )
        kmeans.train(rows)
        _, nearest = kmeans.index.search(rows, 1)
    return torch.from_numpy(kmeans.centroids.copy()), torch.from_numpy(nearest[:, 0].copy())


def train_codebook(keys: Tensor, subvectors: int, bits: int, seed: int = 0) -> Tensor:
    """The codebook of Faiss's product quantiser of keys [N, d]: [subvectors, 2^bits, d / subvectors] float32.

    Raises ``InputError`` where d does not divide, there are fewer keys than centroids, or one is not finite.
    """
    faiss = load_faiss()
    rows = as_rows(keys, "key")
    check_quantiser(len(rows), rows.shape[1], subvectors, bits)
    quantiser = faiss.ProductQuantizer(rows.shape[1], subvectors, bits)
    _gentle(quantiser.cp, seed)
    with _one_thread(faiss):
        quantiser.train(rows)
    book = faiss.vector_to_array(quantiser.centroids).reshape(subvectors, 1 << bits, -1)
    return torch.from_numpy(book.copy())


def _empty(faiss: Any, spec: IndexSpec, dim: int, seed: int) -> Any:
    """An untrained CPU index of ``spec``."""
    metric = faiss.METRIC_INNER_PRODUCT if spec.metric == "inner_product" else faiss.METRIC_L2
    p = spec.parameters
    if spec.kind == "flat":
        return faiss.IndexFlat(dim, metric)
    if spec.kind == "hnsw":
        index = faiss.IndexHNSWFlat(dim, p["M"], metric)
        index.hnsw.efConstruction = p["efConstruction"]
        return index
    if spec.kind == "pq":
        index = faiss.IndexPQ(dim, p["subvectors"], p["bits"], metric)
        _gentle(index.pq.cp, seed)
        return index
    if spec.kind == "ivf":
        index = faiss.index_factory(dim, f"IVF{p['nlist']},Flat", metric)
        _gentle(index.cp, seed)
        return index
    raise InputError(f"Faiss holds no '{spec.kind}' index here")


def _gentle(clustering: Any, seed: int) -> None:
    """Seeded, and silent about small training sets: :class:`IndexSpec` and ``notes`` speak of those."""
    clustering.seed = seed
    clustering.min_points_per_centroid = 1


@contextmanager
def _one_thread(faiss: Any) -> Iterator[None]:
    """Faiss on one thread: HNSW links and k-means sums then come in one order."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
