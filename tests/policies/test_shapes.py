"""A-shape and tri-shape as policies: StreamingLLM with their own defaults."""

from __future__ import annotations

import pytest
import torch
from policy_inputs import DIM, GROUP, HEADS, LAYER, queries, tensors

from kvtune.errors import InputError
from kvtune.policies import get_policy

NONE = torch.empty(HEADS, GROUP, 0, DIM)


def rows(name, parameters, position):
    policy = get_policy(name, parameters)
    keys, values = tensors(position + 1)
    index = policy.build(keys, values, NONE, LAYER)
    return policy.select(index, queries(1), torch.tensor([position])).positions


@pytest.mark.parametrize("name", ["a_shape", "tri_shape"])
def test_defaults_are_128_sinks_and_3968_recent_tokens(name):
    row = rows(name, {}, 4999)[0, 1]
    assert row.tolist() == [*range(128), *range(5000 - 3968, 5000)]


def test_tri_shape_decodes_as_a_shape():
    shape = {"sink": 3, "recent": 50}
    for n_last in (0, 7, 1000):
        assert torch.equal(rows("tri_shape", {**shape, "n_last": n_last}, 200), rows("a_shape", shape, 200))


def test_negative_n_last_is_refused():
    with pytest.raises(InputError, match="n_last"):
        get_policy("tri_shape", {"n_last": -1})
