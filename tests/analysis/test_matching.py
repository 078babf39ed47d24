from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.analysis.matching import TOLERANCE, match_budget
from kvtune.errors import InputError
from kvtune.policies import all_policies, get_policy
from kvtune.policies.full import Full

LONGEST = 100_000
TOKENS = get_policy("oracle_topk")
SHARE = get_policy("wave_index")


def stepwise(block: int, floor: float = 0.0, ceiling: float = math.inf):
    """Bytes of a method that reads whole blocks of ``block`` tokens, between a floor and a ceiling."""

    def measure(policy) -> float:
        return min(floor + 100.0 * math.ceil(getattr(policy, policy.budget) / block) * block, ceiling)

    return measure


@given(target=st.floats(6_000, 9_000_000), floor=st.floats(0, 5_000))
def test_a_whole_number_of_tokens_is_found_within_the_tolerance(target, floor):
    found = match_budget(TOKENS, target, stepwise(1, floor), LONGEST)
    assert found.matched and not found.note
    assert abs(found.read_bytes - target) <= TOLERANCE * target
    assert stepwise(1, floor)(found.policy) == found.read_bytes


@given(target=st.floats(0.003, 0.99), power=st.floats(0.4, 2.5))
def test_a_real_budget_is_found_where_bytes_bend(target, power):
    found = match_budget(SHARE, target, lambda policy: policy.retrieval**power, LONGEST)
    assert found.matched
    assert found.policy.retrieval**power == pytest.approx(target, rel=TOLERANCE)


@given(target=st.integers(200, 50_000), block=st.integers(2, 900))
def test_a_coarse_method_takes_the_most_that_reads_no_more(target, block):
    """Every budget is tried in the reference."""
    measure = stepwise(block)
    found = match_budget(TOKENS, target, measure, LONGEST)
    levels = [100.0 * block * n for n in range(1, 1 + math.ceil(target / 100 / block) + 1)]
    if any(abs(level - target) <= TOLERANCE * target for level in levels):
        assert found.matched
        return
    assert not found.matched and found.note
    under = [level for level in levels if level <= target]
    assert found.read_bytes == (max(under) if under else levels[0])


def test_a_floor_above_the_target_is_said():
    found = match_budget(TOKENS, 1000.0, stepwise(1, floor=1900.0), LONGEST)
    assert not found.matched and found.policy.tokens == 1
    assert found.note == "tokens=1 reads 100% more, and it can't read less"


def test_a_ceiling_below_the_target_is_said_and_the_smallest_such_budget_taken():
    found = match_budget(TOKENS, 1e6, stepwise(1, ceiling=5e5), LONGEST)
    assert not found.matched and found.read_bytes == 5e5
    assert found.note.endswith("reads 50% less, and it can't read more")
    assert 5000 <= found.policy.tokens < LONGEST


def test_both_neighbours_of_the_target_are_named():
    found = match_budget(TOKENS, 100_000.0, stepwise(800), LONGEST)
    assert found.policy.tokens == 800
    assert found.note == "tokens=800 reads 20% less, tokens=801 reads 60% more"


def test_nothing_to_set():
    found = match_budget(Full(), 100.0, lambda policy: 300.0, LONGEST)
    assert not found.matched and found.read_bytes == 300.0 and found.note == "no budget to set"
    assert match_budget(Full(), 299.0, lambda policy: 300.0, LONGEST).matched


def test_values_that_the_policy_refuses_are_not_tried():
    """ShadowKV takes no budget below one chunk, here 12: between two powers of four of the default."""
    policy = get_policy("shadowkv", {"chunk": 12})
    found = match_budget(policy, 1.0, stepwise(1), LONGEST)
    assert found.policy.sparse_budget == 12


@dataclass(frozen=True)
class Bounded(type(TOKENS)):
    """A budget with a top of its own, and no lossless setting to start from."""

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= 5000:
            raise InputError("tokens must lie in 1…5000")

    @classmethod
    def lossless(cls, n):
        return None


@pytest.mark.parametrize(("target", "tokens"), [(450_000.0, 4500), (1e9, 5000)])
def test_without_a_lossless_setting_the_policys_own_limit_is_found(target, tokens):
    found = match_budget(Bounded(), target, stepwise(1), LONGEST)
    assert found.policy.tokens == pytest.approx(tokens, rel=TOLERANCE)
    assert found.matched == (target < 500_001)


def test_few_measurements_are_needed():
    seen = []

    def measure(policy) -> float:
        seen.append(policy)
        return stepwise(16, floor=4000.0)(policy)

    assert match_budget(TOKENS, 30_000.0, measure, LONGEST).matched
    assert len(seen) == len(set(seen)) <= 6


@pytest.mark.parametrize("name", sorted(all_policies()))
def test_every_budget_is_a_number_that_can_be_halved(name):
    policy = get_policy(name)
    if policy.budget is None:
        return
    start = getattr(policy, policy.budget)
    found = match_budget(policy, start / 2, lambda p: float(getattr(p, p.budget)), LONGEST)
    assert found.matched
    assert getattr(found.policy, policy.budget) == pytest.approx(start / 2, rel=TOLERANCE)
