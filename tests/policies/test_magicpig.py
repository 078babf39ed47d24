"""MagicPIG against a slow float64 retelling, and its estimate against the truth over many seeds."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_inputs import DIM, GROUP, HEADS, LAYER, queries, tensors

from kvtune.attention import exact_attention, sparse_attention
from kvtune.errors import InputError
from kvtune.policies import get_policy
from kvtune.policies.simhash import collisions, sampling_probability

NONE = torch.empty(HEADS, GROUP, 0, DIM)
SMALL = {"tables": 30, "bits": 5, "sink": 4, "local": 8}


def built(policy, keys, prompt):
    values = torch.zeros_like(keys)
    index = policy.build(keys[:, :prompt], values[:, :prompt], NONE, LAYER)
    if keys.shape[1] > prompt:
        policy.append(index, keys[:, prompt:], values[:, prompt:], torch.arange(prompt, keys.shape[1]))
    return index


def signs(vector, planes):
    """The bits of one vector, table by table."""
    bits, tables, _ = planes.shape
    return [[float(vector @ planes[b, t].double()) > 0 for b in range(bits)] for t in range(tables)]


def test_samples_keys_that_collide_twice_and_weighs_them_by_their_chance():
    policy = get_policy("magicpig", SMALL)
    keys, _ = tensors(160)
    index = built(policy, keys, 157)
    query, position = queries(1, seed=5), 159
    selection = policy.select(index, query, torch.tensor([position]))
    row = selection.positions[0].tolist()
    for head in range(HEADS):
        mean = keys[head, 4 : 157 - 8].double().mean(0)
        union, sampled, read = set(), {}, 0
        hashes = {t: signs(keys[head, t].double() - mean, index.planes) for t in range(4, position - 7)}
        for g in range(GROUP):
            asked = query[0, head, g].double()
            mine = signs(asked, index.planes)
            for token, theirs in hashes.items():
                key = keys[head, token].double() - mean
                shared = sum(mine[table] == theirs[table] for table in range(30))
                read += shared
                if shared >= 2:
                    angle = math.acos(float(asked @ key / (asked.norm() * key.norm())))
                    a = (1 - angle / math.pi) ** 5
                    sampled[g, token] = 1 - (1 - a) ** 30 - 30 * a * (1 - a) ** 29
                    union.add(token)
        resident = row[head][: selection.resident]
        assert sorted(p for p in resident if p >= 0) == [0, 1, 2, 3, *range(152, 160)]
        found = [p for p in row[head][selection.resident :] if p >= 0]
        assert set(found) == union and len(found) == len(union) > 10
        for g in range(GROUP):
            assert (selection.log_weights[0, head, g, : selection.resident] == 0).all()
            for column, token in enumerate(found, start=selection.resident):
                weight = float(selection.log_weights[0, head, g, column])
                if (g, token) in sampled:
                    assert weight == pytest.approx(-math.log(sampled[g, token]), abs=1e-4)
                else:
                    assert weight == -math.inf
        planes = 30 * 5 * DIM * LAYER.item_bytes // HEADS
        assert int(selection.scan_bytes[0, head]) == 4 * read + 8 * 30 * GROUP + planes


@pytest.mark.parametrize("min_collisions", [1, 2, 3])
def test_probability_is_the_binomial_tail(min_collisions):
    for cosine in (-0.9, 0.0, 0.5, 0.99):
        a = (1 - math.acos(cosine) / math.pi) ** 7
        tail = sum(math.comb(40, j) * a**j * (1 - a) ** (40 - j) for j in range(min_collisions, 41))
        got = sampling_probability(torch.tensor(cosine, dtype=torch.float64), 7, 40, min_collisions)
        assert float(got) == pytest.approx(tail, rel=1e-6)
    ends = sampling_probability(torch.tensor([-1.0, 1.0]), 7, 40, min_collisions)
    assert ends.tolist() == [0.0, 1.0]


def test_estimate_is_unbiased_over_seeds():
    """Over seeds, the mean of Σ e^s/u of sampled keys is Σ e^s of all; likewise the sums of values."""
    keys, values = tensors(120, seed=3)
    query = queries(1, seed=4) / 2
    scores = torch.einsum("hgd,hnd->hgn", query[0].double(), keys[:, 4:112].double()) * LAYER.scaling
    true_mass = scores.exp().sum(-1)
    true_value = torch.einsum("hgn,hnv->hgv", scores.exp(), values[:, 4:112].double())
    masses, sums = [], []
    for seed in range(300):
        policy = get_policy("magicpig", {**SMALL, "bits": 4, "tables": 12, "seed": seed})
        selection = policy.select(built(policy, keys, 119), query, torch.tensor([119]))
        chosen = selection.positions[0, :, selection.resident :]
        logs = selection.log_weights[0, :, :, selection.resident :].double()
        head = torch.arange(HEADS)[:, None]
        dots = torch.einsum("hgd,hnd->hgn", query[0].double(), keys[head, chosen.clamp_min(0)].double())
        weights = (dots * LAYER.scaling + logs).exp() * (chosen >= 0)[:, None]
        masses.append(weights.sum(-1))
        sums.append(torch.einsum("hgn,hnv->hgv", weights, values[head, chosen.clamp_min(0)].double()))
    for samples, truth in ((torch.stack(masses), true_mass), (torch.stack(sums), true_value)):
        error = samples.std(0) / math.sqrt(len(samples))
        away = (samples.mean(0) - truth) / error
        assert float(away.abs().max()) < 4.5
        assert float(away.mean().abs()) < 1.0
    assert (torch.stack(masses).std(0) / true_mass > 0.05).all(), "the seeds must differ"


def test_more_tables_come_closer_to_full_attention():
    keys, values = tensors(800)
    query, position = queries(8), torch.arange(792, 800)
    exact, _ = exact_attention(query, keys, values, position, torch.arange(800), LAYER)
    errors = []
    for tables in (20, 1000):
        policy = get_policy("magicpig", {"tables": tables, "bits": 6, "local": 8})
        selection = policy.select(built(policy, keys, 792), query, position)
        output, _ = sparse_attention(query, position, keys, values, selection, LAYER)
        assert torch.isfinite(output).all()
        errors.append(float((output - exact).norm() / exact.norm()))
    assert errors[1] < errors[0] / 2


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 999), tables=st.integers(1, 300), n=st.integers(1, 40))
def test_collisions_count_equal_buckets(seed, tables, n):
    generator = torch.Generator().manual_seed(seed)
    asked = torch.randint(0, 4, (2, HEADS, GROUP, tables), generator=generator).short()
    stored = torch.randint(0, 4, (HEADS, n, tables), generator=generator).short()
    wanted = (asked[:, :, :, None] == stored[None, :, None]).sum(-1)
    assert torch.equal(collisions(asked, stored).long(), wanted)


@pytest.mark.parametrize("kind", ["two values", "zero", "one huge", "half"])
def test_degenerate_keys_never_give_nan(kind):
    keys, values = tensors(400)
    if kind == "two values":
        keys = torch.where(keys[..., :1] > 0, 1.0, -1.0).expand_as(keys).contiguous()
    elif kind == "zero":
        keys.zero_()
    elif kind == "one huge":
        keys[:, 200] = 1e6
    else:
        keys, values = keys.half(), values.half()
    policy = get_policy("magicpig", SMALL)
    query = queries(2).to(keys.dtype)
    query[1] = 0
    selection = policy.select(built(policy, keys, 399), query, torch.tensor([399, 399]))
    assert not torch.isnan(selection.log_weights).any()
    output, lse = sparse_attention(query, torch.tensor([399, 399]), keys, values, selection, LAYER)
    assert torch.isfinite(output).all() and torch.isfinite(lse).all()


def test_every_head_without_a_sample_still_has_its_residents():
    keys, values = tensors(300)
    policy = get_policy("magicpig", {"tables": 2, "bits": 15, "local": 8})
    selection = policy.select(built(policy, keys, 299), queries(1), torch.tensor([299]))
    output, _ = sparse_attention(queries(1), torch.tensor([299]), keys, values, selection, LAYER)
    assert torch.isfinite(output).all()
    assert int(selection.exact_tokens()[0, 0]) >= 12


def test_index_bytes_count_tables_and_planes():
    policy = get_policy("magicpig", SMALL)
    keys, _ = tensors(160)
    stored = policy.index_bytes(built(policy, keys, 160), LAYER)
    assert stored == HEADS * 30 * 4 * (160 - 12 + 32) + 30 * 5 * DIM * 4


def test_windowed_layer_is_refused():
    keys, values = tensors(64)
    with pytest.raises(InputError, match="sliding window"):
        get_policy("magicpig").build(keys, values, NONE, dataclasses.replace(LAYER, window=32))


@pytest.mark.parametrize(
    "bad", [{"bits": 0}, {"bits": 16}, {"tables": 0}, {"tables": 1}, {"min_collisions": 0},
            {"local": 0}, {"sink": -1}, {"seed": -1}],
)  # fmt: skip
def test_bad_parameters_are_refused(bad):
    with pytest.raises(InputError):
        get_policy("magicpig", bad)
