"""ClusterKV against a slow float64 retelling."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_inputs import DIM, GROUP, HEADS, LAYER, queries, tensors

from kvtune.errors import InputError
from kvtune.policies import get_policy

NONE = torch.empty(HEADS, GROUP, 0, DIM)


def built(policy, keys, prompt):
    values = torch.zeros_like(keys)
    index = policy.build(keys[:, :prompt], values[:, :prompt], NONE, LAYER)
    policy.append(index, keys[:, prompt:], values[:, prompt:], torch.arange(prompt, keys.shape[1]))
    return index


def cluster(index, head, c):
    return index.order[head, index.offsets[head, c] : index.offsets[head, c + 1]].tolist()


def spherical(keys, count, passes):
    """Cosine k-means of keys [n, d] from strided starts, in float64: the cluster of each token."""
    unit = [key / key.norm() for key in keys.double()]
    centroids = [unit[int((i + 0.5) * len(unit) / count)] for i in range(count)]
    for last in [False] * (passes - 1) + [True]:
        which = [max(range(count), key=lambda c: float(key @ centroids[c])) for key in unit]
        for c in range(count):
            mine = [key for key, w in zip(unit, which) if w == c]
            if mine and not last:
                mean = sum(mine) / len(mine)
                centroids[c] = mean / mean.norm()
    return which


def test_clusters_by_cosine_and_keeps_plain_means():
    keys, _ = tensors(16 + 240)
    index = built(get_policy("clusterkv", {"iterations": 4}), keys, 16 + 240)
    for head in range(HEADS):
        which = spherical(keys[head, 16:], 3, 4)
        for c in range(3):
            wanted = [16 + token for token, w in enumerate(which) if w == c]
            assert cluster(index, head, c) == wanted
            assert torch.allclose(
                index.centroids[head, c].double(), keys[head, wanted].double().mean(0), atol=1e-5
            )


@pytest.mark.parametrize("budget", [1, 100, 250])
def test_takes_clusters_until_the_budget_and_cuts_the_last(budget):
    policy = get_policy("clusterkv", {"token_budget": budget})
    keys, _ = tensors(1200)
    index = built(policy, keys, 1190)
    query = queries(1)
    selection = policy.select(index, query, torch.tensor([1199]))
    for head in range(HEADS):
        score = (query[0, head].double() @ index.centroids[head].double().T).sum(0)
        tokens, blocks, touched = [], [], 0
        for c in torch.argsort(score, descending=True, stable=True).tolist():
            taken = cluster(index, head, c)[: budget - len(tokens)]
            if taken:
                blocks.append((c, -(-int(index.sizes[head, c]) // 8), len(taken)))
                tokens += taken
                touched += -(-len(taken) // 8)
        assert len(tokens) == budget and int(selection.touched_pages[0, head]) == touched
        row = selection.positions[0, head].tolist()
        assert row[: selection.resident] == [*range(16), *range(1190, 1200)]
        assert [p for p in row[selection.resident :] if p >= 0] == tokens
        columns = zip(*(part[0, head].tolist() for part in
                        (selection.blocks, selection.block_pages, selection.block_tokens)))  # fmt: skip
        assert [column for column in columns if column[0] >= 0] == blocks
    assert selection.scan_bytes[0].tolist() == [14 * (DIM * LAYER.item_bytes + 4)] * HEADS


@settings(deadline=None, max_examples=15)
@given(prompt=st.integers(1, 500), new=st.integers(0, 700))
def test_clusters_and_tail_partition_the_tokens(prompt, new):
    keys, _ = tensors(prompt + new)
    policy = get_policy("clusterkv", {"iterations": 2})
    index = built(policy, keys, prompt)
    sink, grown = min(16, prompt), new // 320
    first = min(400, max((prompt - sink) // 80, 1)) if prompt > sink else 0
    assert index.sizes.shape[1] == first + 4 * grown
    for head in range(HEADS):
        assert sorted(index.order[head].tolist()) == list(range(sink, prompt + grown * 320))
        for extra in range(grown):
            new_tokens = [t for c in range(4) for t in cluster(index, head, first + 4 * extra + c)]
            assert sorted(new_tokens) == list(range(prompt + extra * 320, prompt + (extra + 1) * 320))
    assert index.tail.shape[1] == new - grown * 320


@pytest.mark.parametrize(("new", "resident"), [(1, 1), (320, 320), (321, 1), (641, 1), (650, 10)])
def test_new_tokens_stay_resident_until_the_next_one_after_320(new, resident):
    policy = get_policy("clusterkv", {"token_budget": 50})
    keys, _ = tensors(200 + new)
    index = built(policy, keys, 200)
    selection = policy.select(index, queries(1), torch.tensor([200 + new - 1]))
    row = selection.positions[0, 0, : selection.resident].tolist()
    assert row == [*range(16), *range(200 + new - resident, 200 + new)]


def test_nothing_is_scored_where_all_tokens_fit():
    keys, _ = tensors(201)
    for budget, scored in [(184, False), (183, True)]:
        policy = get_policy("clusterkv", {"token_budget": budget})
        selection = policy.select(built(policy, keys, 200), queries(1), torch.tensor([200]))
        assert bool((selection.scan_bytes > 0).all()) is scored


@pytest.mark.parametrize("kind", ["two values", "zero", "one huge"])
def test_degenerate_keys_give_each_token_once(kind):
    keys, _ = tensors(500)
    if kind == "two values":
        keys = torch.where(keys[..., :1] > 0, 1.0, -1.0).expand_as(keys).contiguous()
    elif kind == "zero":
        keys.zero_()
    else:
        keys[:, 250] = 1e6
    policy = get_policy("clusterkv", {"token_budget": 5000})
    selection = policy.select(built(policy, keys, 499), queries(1), torch.tensor([499]))
    for head in range(HEADS):
        assert sorted(p for p in selection.positions[0, head].tolist() if p >= 0) == list(range(500))


def test_windowed_layer_is_refused():
    keys, values = tensors(64)
    with pytest.raises(InputError, match="sliding window"):
        get_policy("clusterkv").build(keys, values, NONE, dataclasses.replace(LAYER, window=32))


@pytest.mark.parametrize(
    "bad", [{"token_budget": 0}, {"nlist": 0}, {"sink": -1}, {"update_interval": 0},
            {"update_nlist": 321}, {"iterations": 0}],
)  # fmt: skip
def test_bad_parameters_are_refused(bad):
    with pytest.raises(InputError):
        get_policy("clusterkv", bad)
