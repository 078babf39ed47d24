"""PQCache against Faiss's own product-quantised search and a slow float64 retelling."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from policy_inputs import DIM, GROUP, HEADS, LAYER, queries, tensors

from kvtune.errors import InputError
from kvtune.policies import get_policy
from kvtune.policies.pqcache import nearest_codes, quantised_dots

faiss = pytest.importorskip("faiss")
NONE = torch.empty(HEADS, GROUP, 0, DIM)


def built(policy, keys, prompt, layer=LAYER):
    values = torch.zeros_like(keys)
    index = policy.build(keys[:, :prompt], values[:, :prompt], NONE, layer)
    for position in range(prompt, keys.shape[1]):
        policy.append(index, keys[:, position : position + 1], values[:, :1], torch.tensor([position]))
    return index


def faiss_index(keys, subvectors, bits):
    """Faiss's IndexPQ of keys [n, d], trained on them."""
    index = faiss.IndexPQ(keys.shape[1], subvectors, bits, faiss.METRIC_INNER_PRODUCT)
    index.pq.cp.seed, index.pq.cp.min_points_per_centroid = 0, 1
    faiss.omp_set_num_threads(1)
    index.train(keys.numpy())
    index.add(keys.numpy())
    return index


@pytest.mark.parametrize(("subvectors", "bits"), [(2, 6), (4, 4), (1, 8), (2, 9)])
def test_codes_and_scores_are_those_of_faiss(subvectors, bits):
    keys, _ = tensors(700)
    policy = get_policy("pqcache", {"subvectors": subvectors, "bits": bits})
    index = built(policy, keys, 700)
    query = queries(3)
    dots = quantised_dots(query, index.codebook, index.codes)
    for head in range(HEADS):
        theirs = faiss_index(keys[head, 32:], subvectors, bits)
        packed = theirs.pq.compute_codes(keys[head, 32:].numpy())
        codes = faiss.unpack_bitstrings(packed, subvectors, bits)
        assert np.array_equal(index.codes[head].numpy(), codes)
        scores, ids = theirs.search(query[:, head].reshape(-1, DIM).numpy(), 668)
        mine = np.take_along_axis(dots[:, head].reshape(-1, 668).numpy(), ids, 1)
        assert np.allclose(mine, scores, atol=1e-4)


def test_keeps_the_best_group_sum_of_quantised_softmax():
    policy = get_policy("pqcache", {"token_budget": 100, "recent_share": 0.25, "bits": 4})
    keys, _ = tensors(640)
    index = built(policy, keys, 600)
    query, positions = queries(2), torch.tensor([620, 639])
    selection = policy.select(index, query, positions)
    for step, position in enumerate(positions.tolist()):
        for head in range(HEADS):
            share = torch.zeros(position + 1 - 25 - 32, dtype=torch.float64)
            for g in range(GROUP):
                logits = []
                for token in range(32, position + 1 - 25):
                    centroids = [
                        index.codebook[head, m, int(index.codes[head, token - 32, m])] for m in (0, 1)
                    ]
                    logits.append(query[step, head, g].double() @ torch.cat(centroids).double())
                share += torch.softmax(torch.stack(logits) * LAYER.scaling, 0)
            wanted = (32 + torch.argsort(share, descending=True, stable=True)[:75]).tolist()
            row = selection.positions[step, head]
            resident = row[: selection.resident]
            assert resident[resident >= 0].tolist() == [*range(32), *range(position - 24, position + 1)]
            found = row[selection.resident :]
            # Tokens of equal codes have equal scores: which of them comes last is not the point here.
            got = share[found[found >= 0] - 32]
            assert torch.allclose(got, share[torch.tensor(wanted) - 32], atol=1e-6)
            assert int(selection.scan_bytes[step, head]) == (position + 1 - 57) * 1 + 16 * DIM * 4


def test_code_bytes_are_whole_bytes():
    keys, _ = tensors(600)
    for bits, size in ((4, 1), (6, 2), (8, 2), (9, 3)):
        policy = get_policy("pqcache", {"token_budget": 20, "bits": bits})
        index = built(policy, keys, 599 + 1)
        scan = policy.select(index, queries(1), torch.tensor([599])).scan_bytes[0, 0]
        assert int(scan) == (600 - 10 - 32) * size + 2**bits * DIM * 4
        assert policy.index_bytes(index, LAYER) == HEADS * ((600 - 32) * size + 2**bits * DIM * 4)


def test_cache_blocks_hold_128_tokens():
    policy = get_policy("pqcache", {"token_budget": 60, "bits": 4})
    keys, _ = tensors(1000)
    selection = policy.select(built(policy, keys, 1000), queries(1), torch.tensor([999]))
    for head in range(HEADS):
        found = selection.positions[0, head, selection.resident :]
        found = found[found >= 0]
        blocks = selection.blocks[0, head]
        assert list(dict.fromkeys((found // 128).tolist())) == [b for b in blocks.tolist() if b >= 0]
        assert set(selection.block_pages[0, head][blocks >= 0].tolist()) == {16}
        assert int(selection.touched_pages[0, head]) == len((found // 8).unique())


@pytest.mark.parametrize("prompt", [1, 20, 32, 90])
def test_a_short_prompt_is_attended_in_full_until_it_can_train(prompt):
    policy = get_policy("pqcache", {"token_budget": 30, "bits": 6})
    keys, _ = tensors(110)
    index = built(policy, keys, prompt)
    selection = policy.select(index, queries(15), torch.arange(90, 105))
    counts = selection.exact_tokens()[:, 0].tolist()
    enough = 32 + 64
    assert counts == [p + 1 if p + 1 < enough else 32 + 30 for p in range(90, 105)]
    assert [bool(s) for s in selection.scan_bytes[:, 0] > 0] == [p + 1 >= enough for p in range(90, 105)]


def test_nothing_is_scored_where_all_candidates_fit():
    keys, _ = tensors(232)
    for budget, scored in ((198, True), (200, False), (201, False)):
        policy = get_policy("pqcache", {"token_budget": budget, "bits": 4})
        selection = policy.select(built(policy, keys, 232), queries(1), torch.tensor([231]))
        assert bool((selection.scan_bytes > 0).all()) is scored


@pytest.mark.parametrize("kind", ["two values", "zero", "one huge", "half"])
def test_degenerate_keys_give_a_full_budget_once(kind):
    keys, _ = tensors(500)
    if kind == "two values":
        keys = torch.where(keys[..., :1] > 0, 1.0, -1.0).expand_as(keys).contiguous()
    elif kind == "zero":
        keys.zero_()
    elif kind == "one huge":
        keys[:, 250] = 1e6
    else:
        keys = keys.half()
    policy = get_policy("pqcache", {"token_budget": 100})
    selection = policy.select(built(policy, keys, 499), queries(1).to(keys.dtype), torch.tensor([499]))
    for head in range(HEADS):
        row = selection.positions[0, head]
        row = row[row >= 0]
        assert len(row) == len(row.unique()) == 132


def test_alibi_enters_the_ranking():
    keys, _ = tensors(600)
    layer = dataclasses.replace(LAYER, alibi=(4.0,) * (HEADS * GROUP))
    policy = get_policy("pqcache", {"token_budget": 40, "bits": 4})
    selection = policy.select(built(policy, keys, 600, layer), queries(1) / 100, torch.tensor([599]))
    assert selection.positions[0, 0, selection.resident :].tolist() == list(range(579, 559, -1))


def test_nearest_codes_by_brute_force():
    keys, _ = tensors(50)
    book = torch.randn(HEADS, 4, 5, DIM // 4)
    codes = nearest_codes(keys, book)
    for head, token, m in [(0, 0, 0), (1, 49, 3), (0, 17, 2), (1, 30, 1)]:
        part = keys[head, token, 4 * m : 4 * m + 4]
        assert int(codes[head, token, m]) == int((book[head, m] - part).norm(dim=1).argmin())


def test_a_head_dimension_that_does_not_divide_is_refused():
    keys, values = tensors(64)
    with pytest.raises(InputError, match="head dimension of 16 does not divide into 3 subvectors"):
        get_policy("pqcache", {"subvectors": 3}).build(keys, values, NONE, LAYER)


def test_windowed_layer_is_refused():
    keys, values = tensors(64)
    with pytest.raises(InputError, match="sliding window"):
        get_policy("pqcache").build(keys, values, NONE, dataclasses.replace(LAYER, window=32))


@pytest.mark.parametrize(
    "bad", [{"token_budget": 1}, {"recent_share": 0}, {"recent_share": 1.0}, {"sink": -1},
            {"subvectors": 0}, {"bits": 0}, {"bits": 13}],
)  # fmt: skip
def test_bad_parameters_are_refused(bad):
    with pytest.raises(InputError):
        get_policy("pqcache", bad)
