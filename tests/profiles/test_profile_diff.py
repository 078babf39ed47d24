"""What ``diff`` reports."""

from __future__ import annotations

from kvtune.profiles import Change, diff_profiles


def test_equal_profiles_have_no_changes(profile):
    assert diff_profiles(profile, profile) == []


def test_changed_added_and_removed_keys(profile, variant):
    other = variant(
        **{
            "policy.parameters.retrieval": 0.036,
            "dense_layers": [0],
            "overrides": {2: {"retrieval": 0.05}, 3: {"sink": 8}},
            "cache": None,
            "geometry.windows": [None, None, 512, None],
        }
    )
    assert diff_profiles(profile, other) == [
        Change("geometry.windows", [None] * 4, [None, None, 512, None]),
        Change("policy.parameters.retrieval", 0.018, 0.036),
        Change("dense_layers", [0, 1], [0]),
        Change("cache.policy", "wave", None),
        Change("cache.fraction", 0.05, None),
        Change("overrides.3.sink", None, 8),
    ]


def test_ratio_only_between_numbers():
    assert Change("a", 2, 3).ratio == 1.5
    assert Change("a", 0, 3).ratio is None
    assert Change("a", True, 3).ratio is None
    assert Change("a", None, 3).ratio is None


def test_lists_of_points_are_compared_point_by_point(variant):
    point = {"context_length": 65536, "batch_size": 8, "output_length": 256, "speedup": 1.4}
    first = variant(break_even=[point])
    second = variant(break_even=[{**point, "speedup": 1.5}])
    assert diff_profiles(first, second) == [Change("break_even.0.speedup", 1.4, 1.5)]
