"""The k-means index against a slow retelling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtune.clustering import segmented_kmeans
from kvtune.clustering.key_index import IndexSpec
from kvtune.errors import InputError
from kvtune.indexing.kmeans_index import KMeansIndex

N, DIM, K = 400, 16, 20


def vectors(n, seed):
    return torch.randn(n, DIM, generator=torch.Generator().manual_seed(seed)) + 0.5


KEYS, QUERIES = vectors(N, 0), vectors(21, 1)


def built(keys=KEYS, **parameters):
    return KMeansIndex.build(keys, IndexSpec.of("kmeans", parameters))


def test_searches_the_nearest_clusters_exactly():
    found = built(clusters=25, nprobe=3).search(QUERIES, K)
    clusters = segmented_kmeans(KEYS[None], 25, 1)
    for row, query in enumerate(QUERIES.double()):
        near = torch.argsort(clusters.centroids[0].double() @ query, descending=True).tolist()
        near = [c for c in near if clusters.sizes[0, c] > 0][:3]
        held = [t for t in range(N) if int(clusters.assignment[0, t]) in near]
        best = sorted(held, key=lambda t: -float(KEYS[t].double() @ query))[:K]
        ids = found.ids[row]
        assert ids[ids >= 0].tolist() == best
        scores = KEYS[best].double() @ query
        assert np.allclose(found.scores[row][ids >= 0], scores.numpy(), atol=1e-5)
        assert np.isneginf(found.scores[row][ids < 0]).all()
        assert found.scan_bytes[row] == 25 * DIM * 4 + len(held) * (DIM * 4 + 4)


def test_all_clusters_are_exact_and_absent_neighbours_masked():
    found = built(clusters=25, nprobe=99).search(QUERIES, N + 5)
    assert np.array_equal(np.sort(found.ids[:, :N], 1), np.tile(np.arange(N), (21, 1)))
    assert (found.ids[:, N:] == -1).all() and np.isneginf(found.scores[:, N:]).all()


def test_one_cluster_per_sixteen_keys_unless_said_otherwise():
    assert built().spec.parameters["clusters"] == 25
    assert built(KEYS[:3]).spec.parameters["clusters"] == 1


def test_half_precision_counts_two_bytes():
    assert built(KEYS.bfloat16(), clusters=25, nprobe=99).search(QUERIES, 1).scan_bytes[0] == (
        25 * DIM * 2 + N * (DIM * 2 + 4)
    )


def test_saved_and_loaded_index_answers_alike(tmp_path):
    index = built(clusters=25)
    index.save(tmp_path / "keys.npz")
    loaded = KMeansIndex.load(tmp_path / "keys.npz", index.spec, index.item_bytes)
    first, second = index.search(QUERIES, K), loaded.search(QUERIES, K)
    assert np.array_equal(first.ids, second.ids) and np.array_equal(first.scores, second.scores)
    assert loaded.structure_bytes() == index.structure_bytes() == 25 * (DIM * 4 + 4) + N * 4


@pytest.mark.parametrize("content", ["text", "other arrays", "objects"])
def test_a_file_that_is_no_index_is_named(content, tmp_path):
    path = tmp_path / "keys.npz"
    if content == "text":
        path.write_bytes(b"not an archive")
    else:
        arrays = [1, None] if content == "objects" else [1, 2]
        np.savez(path, centroids=np.array(arrays))
    with pytest.raises(InputError, match=r"keys.npz' is not a k-means index"):
        KMeansIndex.load(path, IndexSpec.of("kmeans"), 4)


def test_bad_keys_and_counts_are_refused():
    keys = KEYS.clone()
    keys[9, 2] = float("nan")
    with pytest.raises(InputError, match=r"key 9 is NaN \(channel 2\)"):
        built(keys)
    with pytest.raises(InputError, match="clusters=401 of index kind 'kmeans' needs at least 401 keys"):
        built(clusters=401)
    with pytest.raises(InputError, match="1 neighbour or more"):
        built().search(QUERIES, 0)
    assert built().search(QUERIES[:0], 3).ids.shape == (0, 3)
