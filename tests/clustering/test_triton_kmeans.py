"""The Triton kernels against the CPU backend: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kvtune.clustering import Clustering, backends, cpu_kmeans, segmented_kmeans

pytest.importorskip("triton")
from kvtune.clustering import triton_kmeans

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def integers(*shape: int, seed: int, low: int = -3, high: int = 4) -> torch.Tensor:
    """Whole numbers that 16-bit products and float32 sums hold exactly."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).half()


def groups(heads: int, n: int, dim: int, n_groups: int) -> torch.Tensor:
    """Keys around well separated directions, each group strewn over the whole sequence."""
    generator = torch.Generator().manual_seed(n)
    directions = 4 * torch.nn.functional.one_hot(torch.arange(n_groups), dim)
    noise = 0.05 * torch.randn(heads, n, dim, generator=generator)
    return (directions[torch.arange(n) % n_groups] + noise).half()


def inertia(keys: torch.Tensor, result: Clustering) -> float:
    own = result.centroids.cpu().double().gather(1, result.assignment.cpu()[..., None].expand(keys.shape))
    return float(((keys.double() - own) ** 2).sum())


@pytest.mark.parametrize(("n", "n_centroids", "dim"), [(300, 70, 16), (5, 3, 8), (257, 128, 24)])
def test_assignment_with_ties_ragged_tiles_and_padded_dimensions(n, n_centroids, dim):
    keys, centroids = integers(2, n, dim, seed=n), integers(2, n_centroids, dim, seed=n + 1).float()
    mean = torch.ones(2, 1, dim)
    scores = torch.bmm(keys.float() - mean, centroids.transpose(1, 2))
    got = triton_kmeans.assign(keys.to(DEVICE), mean.to(DEVICE), centroids.to(DEVICE)).cpu()
    # Positive ties go to the lowest index; a key none of whose scores is positive may take any best one.
    positive = scores.amax(2) > 0
    assert positive.any()
    assert torch.equal(got[positive], scores.argmax(2)[positive])
    assert torch.equal(scores.gather(2, got[..., None])[..., 0], scores.amax(2))


def test_local_passes_follow_the_cpu():
    keys = groups(heads=2, n=67, dim=16, n_groups=4)
    mean = keys.float().mean(1, keepdim=True)
    start = keys[:, :8].float() - mean
    want = cpu_kmeans.refine(keys, mean, start, n_segments=2, passes=2)
    got = triton_kmeans.refine(keys.to(DEVICE), mean.to(DEVICE), start.to(DEVICE), n_segments=2, passes=2)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=2e-3)


@pytest.fixture
def narrow(monkeypatch):
    """Passes at 8 bits however short the segments."""
    monkeypatch.setattr(triton_kmeans, "NARROW_FROM", 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_passes_at_eight_bits_end_where_the_cpu_does(narrow, dtype):
    keys = groups(heads=2, n=131, dim=16, n_groups=4).to(dtype)
    mean = keys.float().mean(1, keepdim=True)
    start = keys[:, :8].float() - mean
    want = cpu_kmeans.refine(keys, mean, start, n_segments=2, passes=5)
    got = triton_kmeans.refine(keys.to(DEVICE), mean.to(DEVICE), start.to(DEVICE), n_segments=2, passes=5)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0.02)


def test_keys_at_eight_bits_keep_their_leading_bits_at_any_norm():
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(2, 70, 48, generator=generator) * torch.logspace(-3, 5, 70)[None, :, None]
    keys[0, 5] = 0
    mean = torch.zeros(2, 1, 48)
    problems = triton_kmeans.Problems(keys.to(DEVICE), mean.to(DEVICE), 4, 1)
    found = triton_kmeans.NarrowKeys(problems, keys.to(DEVICE))
    assert found.scales is not None
    back = found.keys.double() * found.scales[..., None].double()
    largest = keys.abs().amax(2, keepdim=True).double()
    # Half a step of 1 + 3 bits; below those, the smallest step (the interpreter cuts there).
    bound = (keys.double().abs() / 16).maximum(largest / 224 * 2.0**-9)
    assert ((back.cpu() - keys.double()).abs() <= bound * (1 + 1e-6)).all()


def test_an_empty_cluster_keeps_its_centroid_at_eight_bits(narrow):
    keys = groups(heads=1, n=64, dim=16, n_groups=2)
    mean = torch.zeros(1, 1, 16)
    start = torch.zeros(1, 3, 16)
    start[0, 0, 0], start[0, 1, 1], start[0, 2, 5] = 1.0, 1.0, -1.0  # the third is nobody's best
    got = triton_kmeans.refine(keys.to(DEVICE), mean.to(DEVICE), start.to(DEVICE), n_segments=1, passes=4)
    assert torch.equal(got[0, 2].cpu(), start[0, 2])
    assert got[0, 0, 0] > 0.99 and got[0, 1, 1] > 0.99


def test_sums_of_ragged_and_empty_clusters():
    values, generator = integers(2, 90, 24, seed=4), torch.Generator().manual_seed(4)
    assignment = torch.randint(0, 5, (2, 90), generator=generator)
    assignment[assignment == 3] = 0
    sizes = torch.stack([torch.bincount(row, minlength=6) for row in assignment])
    want = cpu_kmeans.cluster_sums(values, assignment, sizes)
    got = triton_kmeans.cluster_sums(values.to(DEVICE), assignment.to(DEVICE), sizes.to(DEVICE))
    assert torch.equal(got.cpu(), want)
    assert not want[:, 3].any()


def test_whole_clustering_is_as_tight_as_on_cpu(monkeypatch):
    keys = torch.randn(1, 150, 16, generator=torch.Generator().manual_seed(9)).half()
    want = segmented_kmeans(keys, 12, 4, iterations=3)
    monkeypatch.setattr(backends, "of", lambda tensor: triton_kmeans)
    got = segmented_kmeans(keys.to(DEVICE), 12, 4, iterations=3)
    assert inertia(keys, got) == pytest.approx(inertia(keys, want), rel=5e-3)
    assert got.sizes.sum() == 150


def test_what_tiles_cannot_hold_goes_elsewhere():
    assert triton_kmeans.supports(torch.empty(1, 4, 128))
    assert not triton_kmeans.supports(torch.empty(1, 4, 100))
    assert not triton_kmeans.supports(torch.empty(1, 4, 512))
    assert backends.of(torch.empty(1, 4, 128)) is cpu_kmeans
