"""The top-k kernels against a stable float64 sort: on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")
from kvtune.attention import triton_topk
from kvtune.attention.triton_topk import Tiles, supports, top_keys

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def integers(*shape: int, seed: int, low: int = -3, high: int = 4) -> Tensor:
    """Whole numbers that 16-bit products and float32 sums hold exactly."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).half()


def reference(queries, keys, positions, k, window=None, excluded=None) -> Tensor:
    """Every product in float64, sorted; the lower position first where two are equal."""
    dots = torch.einsum("thgd,hnd->thgn", queries.double(), keys.double())
    places = torch.arange(keys.shape[1])
    seen = places <= positions[:, None]
    if window is not None:
        seen &= places > positions[:, None] - window
    seen = seen[:, None, :].expand(-1, len(keys), -1)
    if excluded is not None:
        seen = seen & ~excluded
    ranked = dots.masked_fill(~seen[:, :, None, :], -math.inf).sort(dim=-1, descending=True, stable=True)
    best = ranked.indices.masked_fill(ranked.values == -math.inf, -1)[..., :k]
    return torch.nn.functional.pad(best, (0, k - best.shape[-1]), value=-1).int()


def check(queries, keys, positions, k, window=None, excluded=None, tiles=None) -> Tensor:
    inputs = [None if t is None else t.to(DEVICE) for t in (queries, keys, positions, excluded)]
    got = top_keys(*inputs[:3], k, window, inputs[3], tiles).cpu()
    assert torch.equal(got, reference(queries, keys, positions, k, window, excluded))
    return got


@pytest.mark.parametrize(("n", "dim", "group", "k"), [(300, 64, 3, 100), (131, 80, 1, 7), (257, 24, 5, 1)])
def test_ragged_tiles_and_padded_dimensions(n, dim, group, k):
    keys = integers(2, n, dim, seed=n)
    check(integers(1, 2, group, dim, seed=1), keys, torch.tensor([n - 1]), k)


def test_several_steps_over_the_same_keys_with_a_window_and_struck_keys():
    keys, queries = integers(2, 200, 16, seed=3), integers(3, 2, 2, 16, seed=4)
    positions, struck = torch.tensor([5, 120, 199]), integers(3, 2, 200, seed=5) > 0
    got = check(queries, keys, positions, 12, window=40, excluded=struck)
    assert (got[0] < 0).any() and (got[1:] >= 80).all()


def test_sixteen_heads_a_group_and_several_tiles_a_program():
    keys, queries = integers(1, 300, 8, seed=6), integers(1, 1, 16, 8, seed=7)
    check(queries, keys, torch.tensor([299]), 4, tiles=Tiles(keys=64, span=3, stages=2))


def test_a_vector_without_stride_one_and_keys_that_are_a_view():
    keys, queries = integers(2, 16, 90, seed=8).transpose(1, 2), integers(2, 2, 1, 16, seed=9)
    check(queries, keys[:, :77], torch.tensor([60, 76]), 8)


def one_key_each(scores: list[float]) -> Tensor:
    """Keys whose product with (1, 0, …) is the given score."""
    keys = torch.zeros(1, len(scores), 16)
    keys[0, :, 0] = torch.tensor(scores)
    return keys.half()


@pytest.mark.parametrize(
    "scores",
    [
        [1.0] * 300,
        [-0.0, 0.0] * 80,
        [float(i) for i in range(300)],
        [float(-i) for i in range(300)],
        [0.0] * 130 + [float(i % 9) for i in range(100)] + [0.0] * 70,
        [float(i % 128 == 127) for i in range(384)],
    ],
    ids=["equal", "signed zeros", "ascending", "descending", "one tile has all", "one a tile"],
)
@pytest.mark.parametrize("k", [3, 40])
def test_hostile_orders_and_ties(scores, k):
    query = torch.zeros(1, 1, 1, 16).half()
    query[..., 0] = 1
    check(query, one_key_each(scores), torch.tensor([len(scores) - 1]), k, tiles=Tiles(keys=32))


def test_fewer_keys_than_k():
    got = check(integers(1, 1, 2, 8, seed=1), integers(1, 9, 8, seed=2), torch.tensor([5]), 32)
    assert ((got >= 0).sum(-1) == 6).all()


@settings(max_examples=10)
@given(st.integers(1, 150), st.integers(1, 6), st.integers(0, 1000))
def test_ties_everywhere(n, k, seed):
    keys, query = integers(1, n, 4, seed=seed, low=-1, high=2), integers(1, 1, 1, 4, seed=seed + 1)
    check(query, keys, torch.tensor([n - 1]), k, tiles=Tiles(keys=16))


def test_steps_take_turns_where_scores_do_not_fit(monkeypatch):
    monkeypatch.setattr(triton_topk, "SCRATCH_BYTES", 2 * 4 * 50)
    keys, queries = integers(1, 50, 8, seed=1), integers(3, 1, 1, 8, seed=2)
    check(queries, keys, torch.tensor([20, 30, 49]), 5, excluded=integers(3, 1, 50, seed=3) > 2)


def test_what_the_kernels_cannot_hold_goes_elsewhere():
    queries, keys = torch.empty(1, 2, 4, 128).half(), torch.empty(2, 10, 128).half()
    assert supports(queries, keys, 100) and supports(queries, keys, 128)
    assert not supports(queries, keys, 129)
    assert not supports(queries.float(), keys.float(), 100)
    assert not supports(queries.bfloat16(), keys, 100)
    assert not supports(torch.empty(1, 2, 4, 512).half(), torch.empty(2, 10, 512).half(), 100)
    assert not supports(queries, keys[:, :0], 100)
