"""The kernels of Quest's and CTkvr's decode steps: on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

pytest.importorskip("triton")
from kvtune.kernels.choose import BEST, Choice, choose, cut
from kvtune.kernels.query_lists import (
    append_and_cut,
    cosines,
    empty_marks,
    inverse_norms,
    list_marked,
    probe,
)
from kvtune.kernels.quest_pages import append_to_page
from kvtune.kernels.row_scores import empty_row_stats, row_logits
from kvtune.policies.ctkvr_lists import union

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies no bfloat16.
SHORT = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def ints(rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, SHORT])
@pytest.mark.parametrize(("group", "dim"), [(3, 24), (1, 80)])
def test_cosines_are_summed_over_the_group(group, dim, dtype):
    queries, centroids = (
        random(2, group, dim, seed=1, dtype=dtype),
        random(2, 50, group, dim, seed=2, dtype=dtype),
    )
    queries[1, 0] = 0
    centroids[0, 3] = 0
    scores, marks = torch.zeros(2, 50, device=DEVICE), empty_marks(2, 1700, DEVICE) - 1
    cosines(queries, centroids, inverse_norms(centroids), scores, marks)
    want = normalize(queries.double(), dim=-1)[:, None] * normalize(centroids.double(), dim=-1)
    torch.testing.assert_close(scores.double(), want.sum((2, 3)), rtol=0, atol=1e-5)
    assert not marks.any()


def test_probe_finds_the_nearest_and_lists_their_distinct_tokens():
    units, width, length, n_tokens = 3, 21, 40, 9000
    generator = torch.Generator().manual_seed(3)
    scores = random(units, width, seed=4).round(decimals=0)  # many ties
    tokens = torch.stack(
        [torch.randperm(n_tokens, generator=generator)[:length] for _ in range(units * width)]
    ).view(units, width, length)
    tokens[:, 1::2] = tokens[:, ::2][:, : width // 2]  # lists in common
    tokens[:, ::3, 33:] = -1
    tokens = tokens.to(DEVICE)
    n_lists, stop = ints([21, 4, 21]), ints([n_tokens, 8000, 0])
    probed, marks = ints([[7] * 6] * units), empty_marks(units, n_tokens, DEVICE)
    rows, n_rows = ints([[-1] * 240] * units), ints([0] * units)
    plan = ints([[9, 9, 9, 9]] * units)
    probe(scores, tokens.int(), n_lists, stop, probed, marks)
    list_marked(marks, rows, n_rows, plan)
    for unit, (count, end) in enumerate([(21, n_tokens), (4, 8000), (21, 0)]):
        nearest = torch.sort(scores[unit, :count], descending=True, stable=True).indices[:6]
        assert probed[unit].tolist() == nearest.tolist() + [-1] * (6 - len(nearest))
        want, _ = union(tokens[unit, None], nearest[None, None], torch.tensor([end], device=DEVICE))
        wanted = [token for token in want.flatten().tolist() if token >= 0]
        assert int(n_rows[unit]) == len(wanted) and plan[unit].tolist() == [len(wanted), 9, 9, 9]
        assert rows[unit, : len(wanted)].tolist() == wanted and (rows[unit, len(wanted) :] == -1).all()


def test_every_bit_of_a_word_is_listed():
    marks, rows, n_rows = ints([[-1, 0, -(2**31), 1]]), ints([[-1] * 40]), ints([0])
    list_marked(marks, rows, n_rows, ints([[0, 0, 0, 0]]))
    assert int(n_rows) == 34
    assert rows[0].tolist() == [96, 95, *range(31, -1, -1)] + [-1] * 6


@pytest.mark.parametrize(("group", "dim", "softcap"), [(3, 24, None), (1, 64, 5.0)])
@pytest.mark.parametrize("parts", [1, 3])
def test_row_logits(group, dim, softcap, parts):
    counts = (150, 70)
    queries, keys = random(2, group, dim, seed=1), random(2, 300, dim, seed=2)
    order = [torch.randperm(300, generator=torch.Generator().manual_seed(unit))[:160] for unit in range(2)]
    rows = torch.stack(order).int().to(DEVICE)
    logits = torch.full((2, group, 160), torch.nan, device=DEVICE)
    stats = empty_row_stats(2, group, 160, DEVICE)[:, :, :parts].contiguous()
    row_logits(queries, keys, rows, ints(counts), logits, stats, 0.25, softcap)
    for unit, count in enumerate(counts):
        want = 0.25 * queries[unit].double() @ keys[unit, rows[unit, :count].long()].double().T
        if softcap:
            want = softcap * torch.tanh(want / softcap)
        torch.testing.assert_close(logits[unit, :, :count].double(), want, rtol=1e-4, atol=1e-4)
        assert logits[unit, :, count:].isnan().all()
        peaks, sums = stats[:, unit].double()
        got = (peaks + torch.log(sums)).logsumexp(0)
        torch.testing.assert_close(got, want.logsumexp(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, SHORT])
def test_a_token_joins_its_page(dtype):
    tokens, size = random(2, 11, 20, seed=1, dtype=dtype), 4
    stored = torch.zeros(2, 16, 20, dtype=dtype, device=DEVICE)
    values = torch.zeros(2, 16, 6, dtype=dtype, device=DEVICE)
    low, high = random(2, 4, 20, seed=2, dtype=dtype), random(2, 4, 20, seed=3, dtype=dtype)  # no page's yet
    resident, visible, plan = ints([[0] * 4] * 2), ints([9, 9]), ints([[9, 2, 0, 5]] * 2)
    for row in range(11):
        value = random(2, 6, seed=row, dtype=dtype)
        append_to_page(
            tokens[:, row].contiguous(), value, stored, values, low, high, resident, visible, plan, size
        )
        own = row // size
        assert torch.equal(stored[:, : row + 1], tokens[:, : row + 1]) and torch.equal(values[:, row], value)
        assert torch.equal(low[:, own], tokens[:, own * size : row + 1].amin(1))
        assert torch.equal(high[:, own], tokens[:, own * size : row + 1].amax(1))
        assert resident.tolist() == [[0, 0, own * size, row + 1]] * 2
        assert visible.tolist() == [own] * 2 and plan.tolist() == [[own, 2, 0, 5]] * 2
    assert torch.equal(low[:, 0], tokens[:, :4].amin(1))


@pytest.mark.parametrize(
    ("count", "limits", "resident", "stop"),
    [
        (1, (20, 5), [0, 1, 1, 1], 0),  # within the sinks
        (8, (20, 5), [0, 3, 3, 8], 0),  # nothing behind them leaves the window
        (12, (20, 5), [0, 3, 3, 12], 0),  # what does fits
        (13, (20, 5), [0, 3, 9, 13], 9),
        (24, (20, 5), [0, 3, 20, 24], 20),
        (40, (20, 5), [0, 3, 20, 40], 20),  # made while decoding
        (40, (20, 17), [0, 3, 3, 40], 0),
        (40, (2, 0), [0, 3, 3, 40], 0),  # a prompt within the sinks
    ],
)
def test_the_tail_is_cut(count, limits, resident, stop):
    keys, values = random(1, 20, seed=1), random(1, 6, seed=2)
    stored = torch.zeros(1, 40, 20, device=DEVICE), torch.zeros(1, 40, 6, device=DEVICE)
    table, end = ints([[0, 9, 9, count - 1]]), ints([9])
    append_and_cut(keys, values, *stored, table, ints([limits]), end, sink=3, local=4)
    assert table.tolist() == [resident] and end.tolist() == [stop]
    assert torch.equal(stored[0][:, count - 1], keys) and torch.equal(stored[1][:, count - 1], values)


def test_a_choice_among_nothing_follows_one_among_something():
    logits, sizes = random(1, 2, 9, seed=1), ints([[1] * 9])
    stats = torch.stack([logits.amax(-1), torch.exp(logits - logits.amax(-1, keepdim=True)).sum(-1)])[
        :, :, None
    ]
    choice = Choice.empty(1, 9, 3, 2, DEVICE)
    for visible, kept, estimated in ((9, 3, 2), (0, 0, 0)):
        plan = ints([[visible, 3, 2, 9]])
        choose(logits, stats.contiguous(), sizes, plan, choice, BEST)
        cut(choice, sizes, plan)
        assert int((choice.retrieved >= 0).sum()) == int(choice.n_tokens) == kept
        assert int(choice.n_estimated) == estimated and int(choice.truncated) == 0
