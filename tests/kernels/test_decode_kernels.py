"""The kernels of a decode step against float64: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from kvtune.kernels.append import UNBOUNDED, append
from kvtune.kernels.attend import Estimate, Rows, SparseAttention
from kvtune.kernels.choose import BEST, SHARE, Choice, choose, cut
from kvtune.kernels.scan import centroid_logits, empty_stats, page_bounds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies no bfloat16.
SHORT = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def ints(rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize(("group", "dim", "softcap"), [(4, 24, None), (1, 64, 5.0), (3, 80, None)])
def test_centroid_logits(group, dim, softcap):
    queries, centroids = random(2, group, dim, seed=1), random(2, 150, dim, seed=2)
    logits = torch.full((2, group, 150), math.nan, device=DEVICE)
    stats = empty_stats(2, group, 150, DEVICE)
    centroid_logits(queries, centroids, ints([150, 131]), logits, stats, 0.25, softcap)
    want = 0.25 * queries.double() @ centroids.double().transpose(1, 2)
    if softcap:
        want = softcap * torch.tanh(want / softcap)
    torch.testing.assert_close(logits[0].double(), want[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[1, :, :131].double(), want[1, :, :131], rtol=1e-4, atol=1e-4)
    assert logits[1, :, 131:].isnan().all()
    for unit, visible in enumerate((150, 131)):
        peaks, sums = stats[:, unit].double()
        got = (peaks + torch.log(sums)).logsumexp(0)
        torch.testing.assert_close(got, want[unit, :, :visible].logsumexp(-1), rtol=1e-4, atol=1e-4)


def test_page_bounds_are_those_of_the_policy():
    queries, keys = random(2, 4, 32, seed=1), random(2, 9, 16, 32, seed=2)
    low, high = keys.amin(2), keys.amax(2)
    logits = torch.zeros(2, 4, 9, device=DEVICE)
    page_bounds(queries, low, high, ints([9, 9]), logits, empty_stats(2, 4, 9, DEVICE), 1.0)
    q = queries.double()
    want = q.clamp_min(0) @ high.double().transpose(1, 2) + q.clamp_max(0) @ low.double().transpose(1, 2)
    torch.testing.assert_close(logits.double(), want, rtol=1e-4, atol=1e-4)
    best = torch.einsum("ugd,uptd->ugpt", q, keys.double()).amax(-1)
    assert (logits.double() >= best - 1e-4).all()


def chosen_by_sorting(
    logits: Tensor, sizes: Tensor, plan: list[int], how: int
) -> tuple[list[int], list[int], int]:
    """One unit: kept blocks in rank order, estimated ones ascending, and how many were dropped."""
    visible, nprobe, es, room = plan
    rows = logits[:, :visible].double()
    rank = torch.softmax(rows, -1).sum(0) if how == SHARE else rows.amax(0)
    rank = rank.masked_fill(sizes[:visible] == 0, -math.inf)
    order = torch.sort(rank, descending=True, stable=True).indices.tolist()
    order = [block for block in order if sizes[block] > 0]
    kept, pages = [], 0
    for block in order[:nprobe]:
        pages += -(-int(sizes[block]) // 8)
        if pages > room:
            break
        kept.append(block)
    return kept, sorted(order[nprobe : nprobe + es]), len(order[:nprobe]) - len(kept)


def stats_of(logits: Tensor, plans: list[list[int]]) -> Tensor:
    """What the scan would leave of logits [U, G, C]: one part."""
    rows = [row[:, : max(plan[0], 1)] for row, plan in zip(logits, plans)]
    peaks = torch.stack([row.amax(-1) for row in rows])
    sums = torch.stack([torch.exp(row - row.amax(-1, keepdim=True)).sum(-1) for row in rows])
    return torch.stack([peaks, sums])[:, :, None].contiguous()


@pytest.mark.parametrize("how", [SHARE, BEST])
@pytest.mark.parametrize(
    ("width", "plans"),
    [
        (40, [[40, 5, 9, 100], [33, 8, 30, 6]]),
        (200, [[200, 70, 0, 1000], [10, 70, 16, 1000]]),
        (16, [[0, 3, 2, 9], [16, 0, 4, 9]]),
    ],
)
def test_choice(how, width, plans):
    logits = (3 * random(2, 4, width, seed=width)).round(decimals=1)  # many ties
    sizes = torch.randint(0, 30, (2, width), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    choice = Choice.empty(2, width, 80, 40, DEVICE)
    for _ in range(2):  # the scratch is clean again after a step
        choose(logits, stats_of(logits, plans), sizes.to(DEVICE), ints(plans), choice, how)
        cut(choice, sizes.to(DEVICE), ints(plans))
    for unit, plan in enumerate(plans):
        kept, estimated, dropped = chosen_by_sorting(logits[unit].cpu(), sizes[unit], plan, how)
        n = int(choice.n_estimated[unit])
        assert choice.retrieved[unit].tolist() == kept + [-1] * (80 - len(kept))
        assert sorted(choice.estimated[unit, :n].tolist()) == estimated
        assert int(choice.truncated[unit]) == dropped
        tokens = [int(sizes[unit, block]) for block in kept]
        assert choice.starts[unit, : len(kept)].tolist() == [sum(tokens[:i]) for i in range(len(kept))]
        assert int(choice.n_tokens[unit]) == sum(tokens)


def test_ties_go_to_the_lowest_blocks():
    logits = torch.zeros(1, 2, 50, device=DEVICE)
    logits[:, :, 30] = 1
    choice, plans = Choice.empty(1, 50, 4, 5, DEVICE), [[50, 4, 5, 99]]
    sizes = torch.ones(1, 50, dtype=torch.int32, device=DEVICE)
    choose(logits, stats_of(logits, plans), sizes, ints(plans), choice)
    cut(choice, sizes, ints(plans))
    assert choice.retrieved[0].tolist() == [30, 0, 1, 2]
    assert sorted(choice.estimated[0].tolist()) == [3, 4, 5, 6, 7]


def test_cut_lists_the_tokens_block_by_block():
    plans = [[4, 3, 0, 11]]
    sizes, offsets = ints([[3, 1, 70, 5]]), ints([[0, 3, 4, 74, 79]])
    choice = Choice.empty(1, 4, 3, 1, DEVICE)
    rows = torch.full((1, 100), -1, dtype=torch.int32, device=DEVICE)
    logits = torch.tensor([[[1.0, 0.0, 2.0, 3.0]]], device=DEVICE)
    choose(logits, stats_of(logits, plans), sizes, ints(plans), choice)
    cut(choice, sizes, ints(plans), offsets, rows)
    assert choice.retrieved[0].tolist() == [3, 2, 0]
    assert rows[0, :78].tolist() == [*range(74, 79), *range(4, 74), *range(3)]
    assert (rows[0, 78:] == -1).all()


def attended(q: Tensor, keys: Tensor, values: Tensor, rows: list[int], scaling: float, softcap: float | None,
             clusters: list[tuple[Tensor, int, Tensor]]) -> Tensor:  # fmt: skip
    """Float64 output [G, dv] of one unit; clusters are (logits [G], size, value sum [dv])."""
    logits = scaling * q.double() @ keys[rows].double().T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    weights = torch.exp(logits)
    top, bottom = weights @ values[rows].double(), weights.sum(-1)
    for logit, size, value_sum in clusters:
        weight = torch.exp(logit.double())
        top = top + weight[:, None] * value_sum.double()
        bottom = bottom + size * weight
    return top / bottom[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, SHORT])
@pytest.mark.parametrize(
    ("group", "dim", "width", "softcap", "spread"),
    [(4, 24, 24, None, True), (1, 64, 16, 3.0, False), (3, 80, 48, None, False), (2, 40, 16, None, True)],
)
def test_attention_over_rows_and_clusters(group, dim, width, softcap, spread, dtype):
    n, scaling = 300, dim**-0.5
    queries = random(2, group, dim, seed=1, dtype=dtype)
    keys, values = random(2, n, dim, seed=2, dtype=dtype), random(2, n, width, seed=3, dtype=dtype)
    resident, listed = [[2, 4, 250, 300], [0, 0, 299, 300]], [[*range(10, 200, 3)], [7]]
    table = torch.zeros(2, 90, dtype=torch.int32, device=DEVICE)
    for unit, own in enumerate(listed):
        table[unit, : len(own)] = ints(own)
    logits = random(2, group, 20, seed=4)
    sizes = torch.randint(1, 9, (2, 20), generator=torch.Generator().manual_seed(5), dtype=torch.int32).to(
        DEVICE
    )
    sums = random(2, 20, width, seed=6, dtype=dtype)
    spreads = random(2, 20, seed=7).square() if spread else None
    estimated = [[2, 3, 11, 19], []]
    chosen = ints([[2, 3, 11, 19, 0], [0, 0, 0, 0, 0]])
    attention = SparseAttention(2, group, width, exact=200, estimated=5, device=DEVICE)
    out = torch.zeros(2, group, width, dtype=dtype, device=DEVICE)
    rows = Rows(ints(resident), table, ints([len(own) for own in listed]), 60)
    for n in (ints([4, 0]), None):
        if n is not None:
            attention.estimate(Estimate(logits, sizes, sums, chosen, n, spreads), queries, scaling)
        attention(queries, keys, values, rows, out, scaling, n, softcap)
        for unit in range(2):
            first, sink, start, stop = resident[unit]
            exact = [*range(first, first + sink), *range(start, stop), *listed[unit]]
            gain = (scaling * queries[unit].double()).square().sum(-1) / (2 * dim)
            shown = logits[unit].double() + (gain[:, None] * spreads[unit].double() if spread else 0)
            clusters = [(shown[:, c], int(sizes[unit, c]), sums[unit, c]) for c in estimated[unit]]
            want = attended(
                queries[unit],
                keys[unit],
                values[unit],
                exact,
                scaling,
                softcap,
                [] if n is None else clusters,
            )
            torch.testing.assert_close(
                out[unit].double(), want, rtol=0, atol=2e-2 if dtype == SHORT else 1e-5
            )


@pytest.mark.parametrize(
    ("window", "want"),
    [
        (UNBOUNDED, [[0, 3, 5, 31], [0, 0, 0, 3]]),
        (8, [[0, 4, 23, 31], [0, 0, 0, 3]]),
        (2, [[0, 4, 29, 31], [0, 1, 1, 3]]),
    ],
)
def test_append_writes_the_row_and_moves_the_window(window, want):
    keys, values = random(2, 24, seed=1), random(2, 10, seed=2)
    stored_keys, stored_values = torch.zeros(2, 40, 24, device=DEVICE), torch.zeros(2, 40, 10, device=DEVICE)
    resident = ints([[0, 3, 5, 30], [0, 0, 0, 2]])
    append(keys, values, stored_keys, stored_values, resident, sink=4, window=window)
    assert resident.tolist() == want
    for unit, row in enumerate((30, 2)):
        assert torch.equal(stored_keys[unit, row], keys[unit]) and torch.equal(
            stored_values[unit, row], values[unit]
        )
    assert stored_keys.count_nonzero() == keys.count_nonzero()
