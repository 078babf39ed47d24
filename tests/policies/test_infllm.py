"""InfLLM against a slow float64 retelling."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_inputs import DIM, GROUP, HEADS, LAYER, queries, tensors

from kvtune.errors import InputError
from kvtune.policies import get_policy

SMALL = {"n_init": 10, "n_local": 50, "block": 20, "topk": 3, "repr_topk": 4}
WINDOW = 8


def recorded(width=WINDOW):
    """Prompt queries [H, G, W, d]."""
    return queries(width, seed=5).permute(1, 2, 0, 3) if width else torch.empty(HEADS, GROUP, 0, DIM)


def selected(policy, keys, query, position, prompt_queries):
    values = torch.zeros_like(keys)
    index = policy.build(keys[:, :position], values[:, :position], prompt_queries, LAYER)
    policy.append(index, keys[:, position:], values[:, position:], torch.arange(position, keys.shape[1]))
    return policy.select(index, query, torch.tensor([position]))


def representative(block, head_queries, count):
    """Mean of the ``count`` keys of largest mean q·k over ``head_queries`` [W, d], or of largest norm."""
    score = [
        sum(float(q @ key) for q in head_queries) / len(head_queries) if len(head_queries) else key.norm()
        for key in block
    ]
    best = sorted(range(len(block)), key=lambda i: -score[i])[:count]
    return sum(block[i] for i in best) / count


def best_blocks(keys, query, head, formed, prompt_queries):
    """Blocks that have left the local window, from best to worst."""
    scores = []
    for b in range(formed):
        block = keys[head, 10 + b * 20 : 30 + b * 20].double()
        scores.append(
            sum(
                float(query[0, head, g].double() @ representative(block, prompt_queries[head, g].double(), 4))
                for g in range(GROUP)
            )
        )
    return sorted(range(formed), key=lambda b: -scores[b])


@pytest.mark.parametrize("width", [WINDOW, 0])
@pytest.mark.parametrize("position", [300, 319, 320])
def test_retrieves_the_best_blocks(position, width):
    policy = get_policy("infllm", SMALL)
    keys, _ = tensors(position + 1)
    query, prompt_queries = queries(1), recorded(width)
    selection = selected(policy, keys, query, position, prompt_queries)
    formed = (position - 10 - 50) // 20
    for head in range(HEADS):
        blocks = best_blocks(keys, query, head, formed, prompt_queries)[:3]
        assert selection.blocks[0, head].tolist() == blocks
        retrieved = [token for b in blocks for token in range(10 + b * 20, 30 + b * 20)]
        resident = [*range(10), *range(10 + formed * 20, position + 1)]
        assert selection.positions[0, head].tolist() == resident + retrieved
        assert selection.block_pages[0, head].tolist() == [3] * 3
    assert selection.scan_bytes[0].tolist() == [formed * GROUP * DIM * LAYER.item_bytes] * HEADS


@given(position=st.integers(0, 400))
@settings(deadline=None, max_examples=40)
def test_local_window_is_whole_and_less_than_a_block_longer(position):
    keys, _ = tensors(position + 1)
    selection = selected(get_policy("infllm", SMALL), keys, queries(1), position, recorded())
    row = [p for p in selection.positions[0, 0, : selection.resident].tolist() if p >= 10]
    assert row == list(range(position + 1 - len(row), position + 1))
    assert len(row) == max(position - 9, 0) or 50 <= len(row) - 1 < 50 + 20


def test_default_blocks_are_sixteen_pages():
    keys, _ = tensors(4096 + 128 * 20)
    selection = selected(get_policy("infllm"), keys, queries(1), keys.shape[1] - 1, recorded(64))
    assert selection.block_pages[0, 0].tolist() == [16] * 16


def test_nothing_is_scored_where_every_block_fits():
    keys, _ = tensors(10 + 50 + 4 * 20)
    three, four = (
        selected(get_policy("infllm", {**SMALL, "topk": topk}), keys, queries(1), 138, recorded())
        for topk in (2, 3)
    )
    assert (three.scan_bytes > 0).all() and four.scan_bytes.sum() == 0
    assert four.exact_tokens().tolist() == [[139] * HEADS]


def test_identical_keys_and_a_huge_one_stay_finite():
    keys = torch.ones(HEADS, 301, DIM)
    keys[:, 100] = 1e6
    selection = selected(get_policy("infllm", SMALL), keys, queries(1).abs(), 300, recorded().abs())
    assert selection.blocks[0].tolist() == [[4, 0, 1]] * HEADS


def test_windowed_layer_is_refused():
    keys, values = tensors(64)
    with pytest.raises(InputError, match="sliding window"):
        get_policy("infllm").build(keys, values, recorded(), dataclasses.replace(LAYER, window=32))


@pytest.mark.parametrize(
    "bad", [{"n_init": -1}, {"n_local": 0}, {"block": 0}, {"topk": 0}, {"repr_topk": 0},
            {"repr_topk": 129}, {"repr_queries": -1}],
)  # fmt: skip
def test_bad_parameters_are_refused(bad):
    with pytest.raises(InputError):
        get_policy("infllm", bad)
