"""A forked index and its origin do not notice each other."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest
import torch
from runtime_model import GEOMETRY, LIVE, live_plan

from kvtune.policies import all_policies
from kvtune.policies.keys import KeyStore
from kvtune.runtime.forking import fork_index

N = 1200
LAYER = GEOMETRY.layer(0)


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors_in(index):
    """Every tensor that can be reached from an index."""
    match index:
        case torch.Tensor():
            yield index
        case KeyStore():
            yield from (index.keys, index.values)
        case list():
            for item in index:
                yield from tensors_in(item)
        case _ if is_dataclass(index):
            for entry in fields(index):
                yield from tensors_in(getattr(index, entry.name))


def test_every_policy_that_does_not_evict_has_a_row():
    assert {name for name, _ in LIVE.values()} == {n for n, c in all_policies().items() if not c.evicts}


def go_on(policy, index, start, seed, steps=20):
    """Decode ``steps`` tokens: what was selected."""
    keys, values, queries = (random(2, steps, 8, seed=seed + i) for i in range(3))
    chosen = []
    for step in range(steps):
        position = torch.tensor([start + step])
        now = slice(step, step + 1)
        policy.append(index, keys[:, now], values[:, now], position)
        query = queries[:, now].permute(1, 0, 2)[:, :, None].expand(1, 2, 3, 8)
        chosen.append(policy.select(index, query, position).positions)
    return chosen


@pytest.mark.parametrize("case", sorted(LIVE))
@pytest.mark.parametrize("first", ["origin", "fork"])
def test_neither_notices_what_the_other_does(case, first):
    policy = live_plan(case).policy
    keys, values = random(2, N, 8, seed=1), random(2, N, 8, seed=2)
    prompt = random(2, 3, policy.prompt_window, 8, seed=3)
    index = policy.build(keys, values, prompt, LAYER)
    go_on(policy, index, N, seed=10)
    fork = fork_index(index)
    expected = go_on(policy, fork_index(index), N + 20, seed=20)
    used, other = (index, fork) if first == "origin" else (fork, index)
    before = [tensor.clone() for tensor in tensors_in(other)]
    assert before or isinstance(other, type(LAYER))
    go_on(policy, used, N + 20, seed=30)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_in(other), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected, go_on(policy, other, N + 20, seed=20)))


def test_tensors_are_shared():
    policy = live_plan("wave_index").policy
    index = policy.build(random(2, N, 8, seed=1), random(2, N, 8, seed=2), random(2, 3, 0, 8, seed=3), LAYER)
    assert fork_index(index).clusters is not index.clusters
    assert fork_index(index).clusters.centroids is index.clusters.centroids
