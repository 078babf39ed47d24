"""One suite over every policy: what the contract promises, each method keeps."""

from __future__ import annotations

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_inputs import DIM, HEADS, LAYER, queries, tensors

from kvtune.attention import eligible, exact_attention, sparse_attention
from kvtune.errors import InputError
from kvtune.geometry import PAGE_TOKENS
from kvtune.policies import all_policies, get_policy

N, M = 1500, 40
SMALL: dict[str, dict[str, object]] = {
    "a_shape": {"sink": 16, "recent": 200},
    "clusterkv": {"token_budget": 100},
    "ctkvr": {"top_k": 60, "rho": 200, "n_centroids": 50},
    "duo_attention": {"coverage": 0.15, "prompt_queries": 16},
    "full": {},
    "h2o": {"heavy_ratio": 0.05, "recent_ratio": 0.05, "prompt_queries": 16},
    "infllm": {"n_init": 16, "n_local": 64, "block": 32, "topk": 2},
    "magicpig": {"tables": 40, "bits": 6, "local": 32},
    "oracle_topk": {"tokens": 100},
    "pqcache": {"token_budget": 96, "bits": 4},
    "pyramidkv": {"capacity": 150},
    "quest": {"token_budget": 96},
    "retrieval_attention": {"top_k": 64, "sink": 16, "recent": 64},
    "shadowkv": {"sparse_budget": 64, "outlier_chunks": 4},
    "sliding_window": {"window": 200},
    "snapkv": {"capacity": 200},
    "streaming": {"recent": 200},
    "tri_shape": {"sink": 16, "recent": 200, "n_last": 5},
    "wave_index": {"retrieval": 0.05, "segment": 512},
}
"""Parameters small enough that every method really selects: one row per policy."""

NAMES = sorted(all_policies())


def built(policy, keys, values, n=N, layer=LAYER):
    """Index over the first n tokens, the rest appended."""
    prompt = queries(min(policy.prompt_window, n), seed=2).permute(1, 2, 0, 3)
    index = policy.build(keys[:, :n], values[:, :n], prompt, layer)
    if keys.shape[1] > n:
        policy.append(index, keys[:, n:], values[:, n:], torch.arange(n, keys.shape[1]))
    return index


def run(name, parameters=None, n=N, m=M, layer=LAYER):
    policy = get_policy(name, SMALL[name] if parameters is None else parameters)
    keys, values = tensors(n + m)
    positions = torch.arange(n, n + m)
    index = built(policy, keys, values, n, layer)
    return policy, keys, values, positions, policy.select(index, queries(m), positions)


def test_every_policy_has_a_row():
    assert sorted(SMALL) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_no_position_twice_or_out_of_sight(name):
    _, keys, _, positions, selection = run(name)
    visible = eligible(positions, torch.arange(keys.shape[1]), LAYER.window)
    for step in range(len(positions)):
        for head in range(HEADS):
            row = selection.positions[step, head]
            row = row[row >= 0]
            assert len(row.unique()) == len(row)
            assert visible[step, row].all()


@pytest.mark.parametrize("name", NAMES)
def test_current_token_and_sinks_are_attended(name):
    policy, _, _, positions, selection = run(name)
    sink = getattr(policy, "sink", 0)
    for step, position in enumerate(positions.tolist()):
        for head in range(HEADS):
            row = set(selection.positions[step, head].tolist())
            assert position in row
            assert set(range(sink)) <= row


@pytest.mark.parametrize("name", NAMES)
def test_recent_tokens_are_attended(name):
    policy, _, _, positions, selection = run(name)
    recent = getattr(policy, "recent", getattr(policy, "local", 1))
    for step, position in enumerate(positions.tolist()):
        row = set(selection.positions[step, 0].tolist())
        assert set(range(max(0, position - recent + 1), position + 1)) <= row


@pytest.mark.parametrize("name", NAMES)
def test_blocks_account_for_every_retrieved_token(name):
    _, _, _, _, selection = run(name)
    if selection.blocks is None:
        assert (selection.pages() * PAGE_TOKENS >= selection.exact_tokens()).all()
        return
    retrieved = (selection.positions[..., selection.resident :] >= 0).sum(-1)
    assert torch.equal(retrieved, selection.block_tokens.sum(-1))
    used = selection.blocks >= 0
    assert (selection.block_tokens[~used] == 0).all() and (selection.block_pages[~used] == 0).all()
    assert (selection.block_pages * PAGE_TOKENS >= selection.block_tokens).all()
    assert (selection.block_tokens[used] > 0).all()
    for row in selection.blocks.flatten(0, 1):
        row = row[row >= 0]
        assert len(row.unique()) == len(row)
    assert (selection.pages() <= selection.block_pages.sum(-1) + selection.resident).all()
    for block in selection.blocks.unique().tolist():
        if block >= 0:
            for head in range(HEADS):
                pages = selection.block_pages[:, head][selection.blocks[:, head] == block]
                assert len(pages.unique()) <= 1, "a block's size must not change from step to step"


@pytest.mark.parametrize("name", NAMES)
def test_lossless_equals_full_attention(name):
    total = N + M
    parameters = all_policies()[name].lossless(total)
    if parameters is None:
        pytest.skip("the method has no lossless setting")
    _, keys, values, positions, selection = run(name, parameters)
    exact, _ = exact_attention(queries(M), keys, values, positions, torch.arange(total), LAYER)
    output, _ = sparse_attention(queries(M), positions, keys, values, selection, LAYER)
    assert (output - exact).norm() / exact.norm() < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_steps_at_once_equal_single_steps(name):
    policy, keys, values, positions, together = run(name)
    index = built(policy, keys[:, :N], values[:, :N])
    for step, position in enumerate(positions.tolist()):
        new = slice(position, position + 1)
        policy.append(index, keys[:, new], values[:, new], positions[step : step + 1])
        alone = policy.select(index, queries(M)[step : step + 1], positions[step : step + 1])
        for head in range(HEADS):
            assert members(alone, 0, head) == members(together, step, head)
        assert torch.equal(alone.read_bytes(LAYER)[0], together.read_bytes(LAYER)[step])


def members(selection, step, head):
    """Exact and estimated sets of one step, padding apart."""
    exact = set(selection.positions[step, head].tolist()) - {-1}
    estimated = set() if selection.estimated is None else set(selection.estimated[step, head].tolist()) - {-1}
    blocks = [] if selection.blocks is None else [b for b in selection.blocks[step, head].tolist() if b >= 0]
    return exact, estimated, blocks


@pytest.mark.parametrize("name", [name for name in NAMES if all_policies()[name].evicts])
def test_what_was_dropped_never_returns(name):
    _, _, _, positions, selection = run(name)
    for head in range(HEADS):
        dropped = set()
        for step, position in enumerate(positions.tolist()):
            row = set(selection.positions[step, head].tolist()) - {-1}
            assert not row & dropped
            dropped = set(range(position + 1)) - row
        assert dropped


@pytest.mark.parametrize("name", NAMES)
def test_an_index_can_be_run_again(name):
    policy = get_policy(name, SMALL[name])
    keys, values = tensors(N + M)
    positions = torch.arange(N, N + M)
    index = built(policy, keys, values)
    first = policy.select(index, queries(M), positions)
    assert torch.equal(policy.select(index, queries(M), positions).positions, first.positions)


@pytest.mark.parametrize("name", NAMES)
def test_same_input_gives_same_selection(name):
    first, second = run(name)[-1], run(name)[-1]
    assert torch.equal(first.positions, second.positions)


@pytest.mark.parametrize("name", NAMES)
def test_kv_heads_do_not_see_each_other(name):
    policy = get_policy(name, SMALL[name])
    keys, values = tensors(N + M)
    positions = torch.arange(N, N + M)
    before = policy.select(built(policy, keys, values), queries(M), positions)
    keys[1] = torch.randn(N + M, DIM, generator=torch.Generator().manual_seed(9))
    after = policy.select(built(policy, keys, values), queries(M), positions)
    for step in (0, M - 1):
        assert members(before, step, 0) == members(after, step, 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 3, 30])
def test_short_prompts_are_dense(name, n):
    _, keys, _, positions, selection = run(name, n=n, m=2)
    for step, position in enumerate(positions.tolist()):
        for head in range(HEADS):
            assert set(selection.positions[step, head].tolist()) - {-1} == set(range(position + 1))
    assert keys.shape[1] == n + 2


@pytest.mark.parametrize("name", NAMES)
def test_budget_is_monotone_in_bytes(name):
    cls = all_policies()[name]
    if cls.budget is None:
        assert name == "full"
        return
    small = SMALL[name]
    larger = {**small, cls.budget: small[cls.budget] * 3}
    assert run(name, larger)[-1].read_bytes(LAYER).sum() > run(name, small)[-1].read_bytes(LAYER).sum()


@pytest.mark.parametrize("name", NAMES)
def test_who_scans_has_an_index_that_takes_room(name):
    policy, keys, values, _, selection = run(name)
    stored = policy.index_bytes(built(policy, keys, values), LAYER)
    assert stored >= 0
    if selection.scan_bytes.any():
        assert stored > 0, "say in index_bytes what the method keeps to scan"


@pytest.mark.parametrize("name", NAMES)
def test_parameters_round_trip_through_yaml(name):
    policy = get_policy(name, SMALL[name])
    assert get_policy(name, yaml.safe_load(yaml.safe_dump(policy.parameters()))) == policy


@pytest.mark.parametrize("name", NAMES)
def test_unknown_parameter_is_refused(name):
    with pytest.raises(InputError, match="unknown parameter"):
        get_policy(name, {"no_such_thing": 1})


@pytest.mark.parametrize("name", NAMES)
def test_metadata_is_complete(name):
    cls = all_policies()[name]
    assert cls.name == name and cls.title and cls.source and cls.__doc__


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 1400), m=st.integers(1, 12), seed=st.integers(0, 99), name=st.sampled_from(NAMES))
def test_any_length_selects_only_the_past(n, m, seed, name):
    policy = get_policy(name, SMALL[name])
    keys, values = tensors(n + m, seed)
    positions = torch.arange(n, n + m)
    selection = policy.select(built(policy, keys, values, n), queries(m, seed), positions)
    assert (selection.positions <= positions[:, None, None]).all()
    assert (selection.positions == positions[:, None, None]).any(-1).all()
    assert (selection.read_bytes(LAYER) > 0).all()


def test_suggestions_for_misspelt_names():
    with pytest.raises(InputError) as raised:
        get_policy("wave_indx")
    assert "wave_index" in (raised.value.hint or "")
