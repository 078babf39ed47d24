"""RetrievalAttention against direct Faiss calls."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from policy_inputs import DIM, GROUP, HEADS, LAYER, queries, tensors

from kvtune.errors import InputError
from kvtune.policies import get_policy

faiss = pytest.importorskip("faiss")
NONE = torch.empty(HEADS, GROUP, 0, DIM)
SMALL = {"sink": 16, "recent": 64, "top_k": 30, "nlist": 25, "nprobe": 3, "m": 8, "ef_search": 40}


def built(policy, keys, prompt):
    values = torch.zeros_like(keys)
    index = policy.build(keys[:, :prompt], values[:, :prompt], NONE, LAYER)
    if keys.shape[1] > prompt:
        policy.append(index, keys[:, prompt:], values[:, prompt:], torch.arange(prompt, keys.shape[1]))
    return index


def direct(kind, keys):
    faiss.omp_set_num_threads(1)
    if kind == "ivf":
        index = faiss.index_factory(DIM, "IVF25,Flat", faiss.METRIC_INNER_PRODUCT)
        index.cp.seed, index.cp.min_points_per_centroid, index.nprobe = 0, 1, 3
    else:
        index = faiss.IndexHNSWFlat(DIM, 8, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efSearch = 40
    index.train(keys.numpy())
    index.add(keys.numpy())
    return index


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_unites_what_faiss_finds_and_keeps_the_best(kind):
    policy = get_policy("retrieval_attention", {**SMALL, "index": kind})
    keys, _ = tensors(900)
    selection = policy.select(built(policy, keys, 895), queries(5), torch.arange(895, 900))
    for head in range(HEADS):
        theirs = direct(kind, keys[head, 16 : 895 - 64])
        for step in range(5):
            best = {}
            scores, ids = theirs.search(queries(5)[step, head].numpy(), 30)
            for score, token in zip(scores.flatten().tolist(), ids.flatten().tolist()):
                if token >= 0:
                    best[16 + token] = max(score, best.get(16 + token, score))
            wanted = sorted(best, key=lambda token: (-best[token], token))[:30]
            row = selection.positions[step, head].tolist()
            steady = [p for p in row[: selection.resident] if p >= 0]
            assert steady == [*range(16), *range(831, 896 + step)]
            assert [p for p in row[selection.resident :] if p >= 0] == wanted


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_scan_bytes_add_up_the_searches_of_the_group(kind):
    policy = get_policy("retrieval_attention", {**SMALL, "index": kind})
    keys, _ = tensors(900)
    scan = policy.select(built(policy, keys, 899), queries(1), torch.tensor([899])).scan_bytes
    for head in range(HEADS):
        theirs = direct(kind, keys[head, 16 : 899 - 64])
        asked, total = queries(1)[0, head].numpy(), 0
        for g in range(GROUP):
            if kind == "ivf":
                _, lists = theirs.quantizer.search(asked[g : g + 1], 3)
                vectors = sum(theirs.invlists.list_size(number) for number in lists[0].tolist())
                total += 25 * DIM * 4 + vectors * (DIM * 4 + 4)
            else:
                faiss.cvar.hnsw_stats.reset()
                theirs.search(asked[g : g + 1], 30)
                total += faiss.cvar.hnsw_stats.ndis * DIM * 4 + faiss.cvar.hnsw_stats.nhops * 2 * 8 * 4
        assert int(scan[0, head]) == total


def test_all_lists_give_each_head_its_exact_top_tokens():
    policy = get_policy("retrieval_attention", {**SMALL, "top_k": 200, "nprobe": 25})
    keys, _ = tensors(900)
    selection = policy.select(built(policy, keys, 899), queries(1), torch.tensor([899]))
    for head in range(HEADS):
        scores = (queries(1)[0, head].double() @ keys[head, 16:835].double().T).amax(0)
        wanted = (16 + torch.argsort(scores, descending=True)[:200]).tolist()
        assert selection.positions[0, head, selection.resident :].tolist() == wanted


def test_auto_lists_and_probes_hold_twice_the_tokens_wanted():
    policy = get_policy("retrieval_attention", {"sink": 16, "recent": 64, "top_k": 40})
    keys, _ = tensors(980)
    index = built(policy, keys, 980)
    assert index.parts[0].heads[0].spec.parameters["nlist"] == 30
    assert policy._effort(index.parts[0].heads[0], index.parts[0]) == {"nprobe": 3}


@pytest.mark.parametrize("prompt", [1, 50, 300])
def test_later_tokens_join_in_parts_once_they_left_the_window(prompt):
    policy = get_policy("retrieval_attention", {**SMALL, "update_interval": 100})
    keys, _ = tensors(600)
    index = built(policy, keys, prompt)
    first = max(prompt - 64, 16)
    positions = torch.arange(550, 600)
    selection = policy.select(index, queries(50), positions)
    for step, position in enumerate(positions.tolist()):
        tail = first + max(position + 1 - 64 - first, 0) // 100 * 100
        row = selection.positions[step, 0, : selection.resident]
        assert row[row >= 0].tolist() == [*range(16), *range(tail, position + 1)]
    assert index.stop == first + (600 - 64 - first) // 100 * 100
    found = selection.positions[..., selection.resident :]
    assert (found.flatten(1) >= first).any(1).all(), "parts that joined later are searched too"


def test_nothing_is_searched_where_all_tokens_fit():
    keys, _ = tensors(400)
    indexed = 399 - 64 - 16
    for top_k, searched in ((indexed, False), (indexed - 1, True)):
        policy = get_policy("retrieval_attention", {**SMALL, "top_k": top_k, "nprobe": 25})
        selection = policy.select(built(policy, keys, 399), queries(1), torch.tensor([399]))
        assert bool((selection.scan_bytes > 0).all()) is searched
        assert selection.exact_tokens()[0].tolist() == [top_k + 16 + 65] * HEADS


@pytest.mark.parametrize("index", ["ivf", "hnsw"])
@pytest.mark.parametrize("kind", ["two values", "zero", "one huge", "half"])
def test_degenerate_keys_give_each_token_once(index, kind):
    keys, _ = tensors(500)
    if kind == "two values":
        keys = torch.where(keys[..., :1] > 0, 1.0, -1.0).expand_as(keys).contiguous()
    elif kind == "zero":
        keys.zero_()
    elif kind == "one huge":
        keys[:, 250] = 1e6
    else:
        keys = keys.half()
    policy = get_policy("retrieval_attention", {**SMALL, "index": index})
    selection = policy.select(built(policy, keys, 499), queries(1).to(keys.dtype), torch.tensor([499]))
    for head in range(HEADS):
        row = selection.positions[0, head]
        row = row[row >= 0]
        assert len(row) == len(row.unique()) and 81 < len(row) <= 16 + 65 + 30


def test_budgets_and_efforts_share_an_index():
    one, other = (get_policy("retrieval_attention", {**SMALL, "top_k": k, "nprobe": k}) for k in (5, 20))
    assert one.build_key() == other.build_key()
    keys, _ = tensors(500)
    shared = other.select(built(one, keys, 500), queries(1), torch.tensor([499]))
    own = other.select(built(other, keys, 500), queries(1), torch.tensor([499]))
    assert torch.equal(shared.positions, own.positions)
    graph = get_policy("retrieval_attention", {**SMALL, "index": "hnsw"})
    assert graph.build_key() != one.build_key()


def test_broken_keys_are_located():
    keys, values = tensors(500)
    keys[1, 100, 2] = float("nan")
    with pytest.raises(InputError, match=r"key 84 is NaN \(channel 2\)"):
        get_policy("retrieval_attention", SMALL).build(keys, values, NONE, LAYER)


def test_windowed_layer_is_refused():
    keys, values = tensors(64)
    with pytest.raises(InputError, match="sliding window"):
        get_policy("retrieval_attention").build(keys, values, NONE, dataclasses.replace(LAYER, window=32))


@pytest.mark.parametrize(
    "bad", [{"index": "flat"}, {"top_k": 0}, {"recent": 0}, {"sink": -1}, {"m": 1}, {"nprobe": -1},
            {"update_interval": 0}, {"ef_construction": 0}],
)  # fmt: skip
def test_bad_parameters_are_refused(bad):
    with pytest.raises(InputError):
        get_policy("retrieval_attention", bad)
