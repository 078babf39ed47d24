"""Segmented k-means against an obvious float64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.clustering import Clustering, backends, cluster_sums, members, segmented_kmeans, torch_kmeans
from kvtune.errors import InputError


def reference(
    keys: torch.Tensor, n_centroids: int, n_segments: int, iterations: int, centre: bool = True
) -> Clustering:
    """One head at a time, one token at a time, in float64."""
    results = [_reference_head(head.double(), n_centroids, n_segments, iterations, centre) for head in keys]
    return Clustering(*(torch.stack(part) for part in zip(*results)))


def _reference_head(keys, n_centroids, n_segments, iterations, centre):
    n = len(keys)
    mean = keys.mean(0) if centre else torch.zeros_like(keys[0])
    keys = keys - mean
    centroids = [keys[int((i + 0.5) * n / n_centroids)] for i in range(n_centroids)]
    length, width = n // n_segments, n_centroids // n_segments
    for _ in range(iterations - 1):
        for s in range(n_segments):
            mine = range(s * width, (s + 1) * width)
            chosen = [_best(keys[t], centroids, mine) for t in range(s * length, (s + 1) * length)]
            for c in mine:
                group = [keys[s * length + i] for i, best in enumerate(chosen) if best == c]
                if group:
                    centre_of_group = sum(group) / len(group)
                    norm = centre_of_group.norm()
                    centroids[c] = centre_of_group / norm if norm > 0 else centre_of_group
    assignment = [_best(key, centroids, range(n_centroids)) for key in keys]
    for c in range(n_centroids):
        group = [keys[t] for t in range(n) if assignment[t] == c]
        if group:
            centroids[c] = sum(group) / len(group)
    sizes = [assignment.count(c) for c in range(n_centroids)]
    return torch.stack(centroids) + mean, torch.tensor(assignment), torch.tensor(sizes)


def _best(key, centroids, among):
    scores = [float(key @ centroids[c]) for c in among]
    return among[scores.index(max(scores))]


def inertia(keys: torch.Tensor, result: Clustering) -> float:
    """Sum of squared distances of the keys to their cluster's centroid."""
    keys, centroids = keys.double(), result.centroids.double()
    own = torch.stack([c[a] for c, a in zip(centroids, result.assignment)])
    return float(((keys - own) ** 2).sum())


def integers(heads: int, n: int, dim: int, seed: int) -> torch.Tensor:
    """Small whole numbers whose sums are exact, so that float32 and float64 see the same ties."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (heads, n, dim), generator=generator).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("n", "n_centroids", "n_segments"), [(96, 12, 3), (101, 12, 4), (37, 4, 4), (16, 16, 1), (19, 16, 4)]
)
def test_equals_the_reference(n, n_centroids, n_segments, dtype):
    keys = torch.randn(2, n, 16, generator=torch.Generator().manual_seed(n)).to(dtype)
    got = segmented_kmeans(keys, n_centroids, n_segments, iterations=4)
    want = reference(keys, n_centroids, n_segments, iterations=4)
    assert torch.equal(got.assignment, want.assignment)
    assert torch.equal(got.sizes, want.sizes)
    assert got.centroids.dtype == torch.float32
    torch.testing.assert_close(got.centroids.double(), want.centroids, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_first_assignment_breaks_ties_by_lowest_index(seed):
    keys = integers(2, 60, 3, seed)
    got = segmented_kmeans(keys, 20, 4, iterations=1, centre=False)
    want = reference(keys, 20, 4, iterations=1, centre=False)
    assert torch.equal(got.assignment, want.assignment)
    torch.testing.assert_close(got.centroids.double(), want.centroids)


@given(
    n=st.integers(1, 80),
    per_segment=st.integers(1, 6),
    n_segments=st.integers(1, 4),
    dim=st.integers(1, 9),
    iterations=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_invariants(n, per_segment, n_segments, dim, iterations, seed):
    n_centroids = per_segment * n_segments
    n = max(n, n_centroids)
    keys = integers(2, n, dim, seed)
    got = segmented_kmeans(keys, n_centroids, n_segments, iterations)
    assert got.assignment.shape == (2, n)
    assert int(got.assignment.min()) >= 0 and int(got.assignment.max()) < n_centroids
    for h in range(2):
        for c in range(n_centroids):
            mine = keys[h][got.assignment[h] == c]
            assert got.sizes[h, c] == len(mine)
            if len(mine):
                torch.testing.assert_close(got.centroids[h, c], mine.mean(0), rtol=1e-4, atol=1e-5)


def test_identical_keys_fall_into_the_first_cluster_and_the_rest_stay():
    keys = torch.full((1, 64, 8), 2.5)
    got = segmented_kmeans(keys, 8, 2)
    assert got.sizes[0].tolist() == [64, 0, 0, 0, 0, 0, 0, 0]
    torch.testing.assert_close(got.centroids, torch.full((1, 8, 8), 2.5))


def test_duplicates_and_empty_clusters_are_as_good_as_the_reference():
    keys = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(3)).repeat_interleave(20, 1)
    got, want = segmented_kmeans(keys, 24, 3), reference(keys, 24, 3, iterations=10)
    assert int((got.sizes == 0).sum()) > 0
    assert torch.isfinite(got.centroids).all()
    assert inertia(keys, got) == pytest.approx(inertia(keys, want), rel=1e-4, abs=1e-6)


def test_local_pass_stays_within_segments():
    keys = torch.randn(2, 103, 8, generator=torch.Generator().manual_seed(0))
    got = segmented_kmeans(keys, 12, 4, global_pass=False)
    segment = torch.arange(103).clamp(max=99) // 25
    assert torch.equal(got.assignment // 3, segment.expand(2, -1))
    whole, one = segmented_kmeans(keys, 12, 1), segmented_kmeans(keys, 12, 1, global_pass=False)
    assert torch.equal(whole.assignment, one.assignment)


def test_same_result_with_any_number_of_threads_and_in_plain_torch(monkeypatch):
    keys = torch.randn(3, 1100, 32, generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = segmented_kmeans(keys, 64, 2)
        torch.set_num_threads(3)
        three = segmented_kmeans(keys, 64, 2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(backends, "of", lambda tensor: torch_kmeans)
    plain = segmented_kmeans(keys, 64, 2)
    assert torch.equal(one.assignment, three.assignment)
    assert torch.equal(one.centroids, three.centroids)
    assert inertia(keys, plain) == pytest.approx(inertia(keys, one), rel=1e-4)


def test_many_blocks_of_centroids_and_tokens_agree_with_one_product():
    from kvtune.clustering import cpu_kmeans

    generator = torch.Generator().manual_seed(5)
    keys = torch.randint(-4, 5, (1, 1300, 16), generator=generator).float()
    centroids = torch.randint(-4, 5, (1, 1027, 16), generator=generator).float()
    mean = torch.ones(1, 1, 16)
    want = torch.bmm(keys - mean, centroids.transpose(1, 2)).argmax(2)
    assert torch.equal(cpu_kmeans.assign(keys, mean, centroids), want)
    assert torch.equal(torch_kmeans.assign(keys, mean, centroids), want)


def test_members_lists_every_token_once_in_order():
    assignment = torch.tensor([[2, 0, 2, 1, 0], [3, 3, 3, 3, 3]])
    order, offsets = members(assignment, torch.tensor([[2, 1, 2, 0], [0, 0, 0, 5]]))
    assert order.tolist() == [[1, 4, 3, 0, 2], [0, 1, 2, 3, 4]]
    assert offsets.tolist() == [[0, 2, 3, 5, 5], [0, 0, 0, 0, 5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cluster_sums(dtype):
    values = integers(2, 50, 6, seed=2).to(dtype)
    assignment = torch.randint(0, 7, (2, 50), generator=torch.Generator().manual_seed(2))
    got = cluster_sums(values, assignment, 9)
    assert got.dtype == torch.float32
    for h in range(2):
        for c in range(9):
            assert torch.equal(got[h, c], values[h][assignment[h] == c].float().sum(0))


@pytest.mark.parametrize(
    ("n", "n_centroids", "n_segments", "iterations", "said"),
    [
        (10, 12, 1, 10, "10 tokens are fewer than the 12 centroids"),
        (64, 10, 4, 10, "10 centroids do not divide into 4 segments"),
        (64, 0, 1, 10, "at least 1"),
        (64, 8, 0, 10, "at least 1"),
        (64, 8, 1, 0, "at least 1"),
    ],
)
def test_counts_that_do_not_fit_are_refused(n, n_centroids, n_segments, iterations, said):
    with pytest.raises(InputError, match=said):
        segmented_kmeans(torch.randn(1, n, 4), n_centroids, n_segments, iterations)


@pytest.mark.parametrize("keys", [torch.randn(8, 4), torch.ones(1, 8, 4, dtype=torch.int64)])
def test_wrong_keys_are_refused(keys):
    with pytest.raises(InputError, match="floating-point tensor"):
        segmented_kmeans(keys, 4, 1)
