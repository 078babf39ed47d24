"""Settings tried in a layer: valid, distinct, and near where they should be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.policies import all_policies, get_policy
from kvtune.tuning.ladder import ladder, neighbours


def with_setting(policy, setting):
    return get_policy(policy.name, {**policy.parameters(), **setting})


@pytest.mark.parametrize("name", sorted(all_policies()))
def test_ladder_holds_the_policy_itself_and_only_what_it_allows(name):
    policy = get_policy(name)
    found = [with_setting(policy, setting) for setting in ladder(policy)]
    assert policy in found and len(set(found)) == len(found)


@pytest.mark.parametrize("name", sorted(n for n, p in all_policies().items() if p.budget))
def test_neighbours_lead_up_and_down(name):
    policy = get_policy(name)
    here = getattr(policy, policy.budget)
    budgets = [setting[policy.budget] for setting in neighbours(policy, {}, 8192)]
    assert min(budgets) < here and (max(budgets) > here or here == 1.0)


def test_a_policy_without_a_budget_has_no_neighbours():
    assert ladder(get_policy("full")) == [{}] and neighbours(get_policy("full"), {}, 8192) == []


@given(
    place=st.integers(0, 1000),
    context=st.sampled_from([1500, 6144, 131072]),
    base=st.sampled_from(
        [
            {},
            {"retrieval": 0.2},
            {"estimation": 1.0, "retrieval": 0.9},
            {"local": 7},
            {"spread_correction": 0.5},
        ]
    ),
)
def test_wave_neighbours_change_one_thing_and_leave_room(place, context, base):
    policy = get_policy("wave_index", base)
    rungs = ladder(policy)
    setting = rungs[place % len(rungs)]
    near = neighbours(policy, setting, context)
    assert setting not in near and len(near) >= 5
    for other in near:
        with_setting(policy, other)
        changed = {name for name in setting if other[name] != setting[name]}
        assert len(changed) == 1


def test_neighbours_start_at_the_share_of_every_head():
    policy = get_policy("wave_index", {"retrieval": 0.1})
    alone = [neighbours(policy, {"retrieval": share}, 8192) for share in (0.05, 0.2)]
    both = neighbours(policy, {"retrieval": 0.1, "head_shares": "0.5,2"}, 8192, {0.05, 0.2})
    assert sorted(map(str, both)) == sorted({str(setting) for part in alone for setting in part})


@given(st.floats(0.0001, 0.9), st.sampled_from([4, 16, 64, 256]), st.sampled_from([6144, 131072]))
def test_a_step_of_retrieval_is_one_cluster_or_more(retrieval, tokens, context):
    policy = get_policy("wave_index", {"retrieval": retrieval, "tokens_per_centroid": tokens})
    shares = [near["retrieval"] for near in neighbours(policy, {}, context)]
    cluster, rounding = tokens / context, 1e-6
    assert max(shares) >= min(max(retrieval, cluster) + cluster, 1.0) - rounding
    assert min(shares) <= max(retrieval - cluster, cluster) + rounding
    assert min(shares) > 0
