"""CTkvr against a slow float64 retelling: centroids, lists, probes, rescoring, and what each step reads."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from policy_inputs import DIM, GROUP, HEADS, LAYER, queries, tensors

from kvtune.attention import exact_attention, sparse_attention
from kvtune.errors import InputError
from kvtune.policies import get_policy

N, M = 400, 6
SMALL = {"top_k": 40, "n_centroids": 12, "rho": 50, "nprobe": 3, "sink": 4, "local": 16}


def prompt(count: int = 12, seed: int = 2) -> torch.Tensor:
    """Prompt queries [H, G, count, d]."""
    return queries(count, seed).permute(1, 2, 0, 3)


def built(policy, n=N, m=M, layer=LAYER, window=None):
    keys, values = tensors(n + m)
    index = policy.build(keys[:, :n], values[:, :n], prompt() if window is None else window, layer)
    policy.append(index, keys[:, n:], values[:, n:], torch.arange(n, n + m))
    return index, keys, values


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


def slow_lists(window, keys, head, sink, rho):
    """Per centroid, the rho keys after the sinks of largest group-summed probability among all keys."""
    lists = []
    for c in range(window.shape[2]):
        total = torch.zeros(keys.shape[1], dtype=torch.float64)
        for g in range(GROUP):
            logits = keys[head].double() @ window[head, g, c].double() * LAYER.scaling
            total += torch.softmax(logits, 0)
        order = torch.argsort(total, descending=True, stable=True).tolist()
        lists.append([token for token in order if token >= sink][:rho])
    return lists


def slow_probes(window, query, head, nprobe):
    similarity = [
        sum(cosine(window[head, g, c].double(), query[head, g].double()) for g in range(GROUP))
        for c in range(window.shape[2])
    ]
    return sorted(range(len(similarity)), key=lambda c: -similarity[c])[:nprobe]


def slow_rank(keys, query, head, candidates, weight=lambda token: 1.0):
    """Candidates from best to worst."""
    total = dict.fromkeys(candidates, 0.0)
    for g in range(GROUP):
        scores = {
            t: float(keys[head, t].double() @ query[head, g].double()) * LAYER.scaling for t in candidates
        }
        norm = sum(math.exp(score) for score in scores.values())
        for token, score in scores.items():
            total[token] += math.exp(score) / norm
    return sorted(candidates, key=lambda token: -total[token] * weight(token))


def retrieved(selection, step, head):
    return [p for p in selection.positions[step, head, selection.resident :].tolist() if p >= 0]


def test_retrieves_the_best_of_the_union_of_the_nearest_lists():
    policy = get_policy("ctkvr", SMALL)
    index, keys, _ = built(policy)
    query, positions = queries(M), torch.arange(N, N + M)
    selection = policy.select(index, query, positions)
    for head in range(HEADS):
        lists = slow_lists(prompt(), keys[:, :N], head, sink=4, rho=50)
        for step, position in enumerate(positions.tolist()):
            probes = slow_probes(prompt(), query[step], head, nprobe=3)
            tail = min(position + 1 - 16, N)
            candidates = sorted({t for c in probes for t in lists[c] if t < tail})
            ranked = slow_rank(keys, query[step], head, candidates)[:40]
            assert retrieved(selection, step, head) == ranked
            resident = selection.positions[step, head, : selection.resident]
            assert resident[resident >= 0].tolist() == [*range(4), *range(tail, position + 1)]
            scanned = 12 * GROUP * DIM * 4 + 3 * 50 * 4 + len(candidates) * DIM * 4
            assert int(selection.scan_bytes[step, head]) == scanned


def test_only_the_last_queries_are_centroids_and_fewer_are_used_as_they_are():
    policy = get_policy("ctkvr", SMALL)
    assert policy.prompt_window == 12
    wide, _, _ = built(policy, window=prompt(30))
    assert wide.stretches[0].lists.centroids.equal(prompt(30)[:, :, -12:].transpose(1, 2))
    few, _, _ = built(policy, window=prompt(2))
    assert few.stretches[0].lists.tokens.shape == (HEADS, 2, 50)
    selection = policy.select(few, queries(1), torch.tensor([N]))
    assert 0 < len(retrieved(selection, 0, 0)) <= 40


def test_attention_stays_full_without_prompt_queries():
    policy = get_policy("ctkvr", SMALL)
    index, keys, values = built(policy, window=prompt(0))
    positions = torch.arange(N, N + M)
    selection = policy.select(index, queries(M), positions)
    exact, _ = exact_attention(queries(M), keys, values, positions, torch.arange(N + M), LAYER)
    output, _ = sparse_attention(queries(M), positions, keys, values, selection, LAYER)
    assert torch.allclose(output, exact, atol=1e-5)
    assert selection.scan_bytes.sum() == 0


def test_nothing_is_scored_where_every_token_fits():
    room = N + 1 - 16 - 4
    for top_k, scored in [(room, False), (room - 1, True)]:
        policy = get_policy("ctkvr", {**SMALL, "top_k": top_k})
        index, _, _ = built(policy)
        selection = policy.select(index, queries(1), torch.tensor([N]))
        assert bool(selection.scan_bytes.any()) == scored
        assert (len(retrieved(selection, 0, 0)) == room) != scored


def test_a_step_keeps_what_the_lists_hold_where_that_is_less_than_top_k():
    policy = get_policy("ctkvr", {**SMALL, "nprobe": 1, "rho": 10})
    index, _, _ = built(policy)
    selection = policy.select(index, queries(1), torch.tensor([N]))
    assert len(retrieved(selection, 0, 0)) <= 10


def test_position_weights_run_over_the_sequence():
    policy = get_policy("ctkvr", {**SMALL, "position_weights": "0.1:5", "top_k": 20})
    index, keys, _ = built(policy)
    query, position = queries(1), N + 2
    selection = policy.select(index, query, torch.tensor([position]))
    for head in range(HEADS):
        lists = slow_lists(prompt(), keys[:, :N], head, sink=4, rho=50)
        probes = slow_probes(prompt(), query[0], head, nprobe=3)
        candidates = sorted({t for c in probes for t in lists[c] if t < position + 1 - 16})
        ranked = slow_rank(keys, query[0], head, candidates, lambda t: 0.1 + 4.9 * t / position)
        assert retrieved(selection, 0, head) == ranked[:20]
        assert retrieved(selection, 0, head) != slow_rank(keys, query[0], head, candidates)[:20]


def test_budget_grows_with_the_root_of_the_length():
    policy = get_policy("ctkvr", {**SMALL, "top_k": 20, "average_length": 100})
    index, _, _ = built(policy)
    selection = policy.select(index, queries(2), torch.tensor([N - 1, N + 5]))
    for step, length in enumerate((N, N + 6)):
        assert len(retrieved(selection, step, 0)) == round(20 * math.sqrt(length / 100))


def test_cold_start_is_full_and_then_ramps_down_to_the_budget():
    policy = get_policy("ctkvr", {**SMALL, "top_k": 20, "cold_start": 4})
    n, m = N, 12
    index, keys, _ = built(policy, n, m)
    query, positions = queries(m), torch.arange(n, n + m)
    selection = policy.select(index, query, positions)
    plain = get_policy("ctkvr", {**SMALL, "top_k": 20}).select(index, query, positions)
    for step in range(m):
        room = min(n + step + 1 - 16, n) - 4
        kept = retrieved(selection, step, 1)
        if step < 4:
            assert sorted(kept) == list(range(4, 4 + room))
            assert int(selection.scan_bytes[step, 1]) == 0
        elif step < 8:
            count = 20 + math.ceil((room - 20) * (8 - step) / 4)
            assert kept == slow_rank(keys, query[step], 1, list(range(4, 4 + room)))[:count]
            assert int(selection.scan_bytes[step, 1]) == room * DIM * 4 * (count < room)
        else:
            assert kept == retrieved(plain, step, 1)
            assert selection.scan_bytes[step].equal(plain.scan_bytes[step])


def test_int8_scores_read_a_quarter_of_float32_keys():
    plain, small = (get_policy("ctkvr", {**SMALL, "int8": int8}) for int8 in (False, True))
    index, _, _ = built(plain)
    query, positions = queries(M), torch.arange(N, N + M)
    exact, rounded = (policy.select(index, query, positions) for policy in (plain, small))
    overhead = 12 * GROUP * DIM * 4 + 3 * 50 * 4
    keys_read = (exact.scan_bytes - overhead) // (DIM * 4)
    assert rounded.scan_bytes.equal(overhead + keys_read * (DIM + 2))
    overlap = set(retrieved(exact, 0, 0)) & set(retrieved(rounded, 0, 0))
    assert len(overlap) >= 36
    assert plain.index_bytes(index, LAYER) == HEADS * (12 * GROUP * DIM * 4 + 12 * 50 * 4)
    stored = small.index_bytes(index, LAYER) - plain.index_bytes(index, LAYER)
    assert stored == HEADS * (N + M) * (DIM + 2)


def test_an_index_serves_every_budget_that_shares_its_build_key():
    small = get_policy("ctkvr", SMALL)
    other = get_policy("ctkvr", {**SMALL, "top_k": 90, "nprobe": 5, "int8": True, "cold_start": 2})
    assert small.build_key() == other.build_key()
    for change in ({"rho": 20}, {"n_centroids": 9}, {"simhash": 0.9}, {"sink": 0}, {"dynamic": 5}):
        assert get_policy("ctkvr", {**SMALL, **change}).build_key() != small.build_key()


@pytest.mark.parametrize("kind", ["one huge key", "two values", "zero queries"])
def test_odd_keys_give_finite_outputs(kind):
    policy = get_policy("ctkvr", {**SMALL, "int8": True, "simhash": 0.93})
    keys, values = tensors(N + 1)
    window = prompt()
    if kind == "one huge key":
        keys[:, 50] *= 1e6
    elif kind == "two values":
        keys = keys.sign()
    else:
        window = torch.zeros_like(window)
    index = policy.build(keys[:, :N], values[:, :N], window, LAYER)
    policy.append(index, keys[:, N:], values[:, N:], torch.tensor([N]))
    positions = torch.tensor([N])
    selection = policy.select(index, queries(1), positions)
    output, _ = sparse_attention(queries(1), positions, keys, values, selection, LAYER)
    assert output.isfinite().all()
    assert 0 < len(retrieved(selection, 0, 0)) <= 40


def test_windowed_layer_is_refused():
    keys, values = tensors(64)
    layer = dataclasses.replace(LAYER, window=32)
    with pytest.raises(InputError, match="sliding window"):
        get_policy("ctkvr").build(keys, values, prompt(), layer)


@pytest.mark.parametrize(
    "bad",
    [
        {"top_k": 0}, {"n_centroids": 0}, {"rho": 0}, {"nprobe": 0}, {"sink": -1}, {"local": 0},
        {"dynamic": -1}, {"simhash": 0.4}, {"simhash": 1.1}, {"cold_start": -1}, {"average_length": -1},
        {"centroids": "first"}, {"position_weights": "1"}, {"position_weights": "0:1"},
        {"position_weights": "a:b"}, {"position_weights": "1:2:3"}, {"position_weights": "1:inf"},
        {"centroids": "offline"}, {"offline": "somewhere.npz"}, {"int8": "perhaps"},
    ],
)  # fmt: skip
def test_bad_parameters_are_refused(bad):
    with pytest.raises(InputError):
        get_policy("ctkvr", bad)
