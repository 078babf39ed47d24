"""Stage fits on synthetic timings: exact recovery, no negative constant, the least relative error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.errors import InputError
from kvtune.hardware import Features, Sample, Stage, fit_stage, fit_stages
from kvtune.hardware.fit import nonnegative_least_squares

BYTES = [1e5, 1e6, 4e6, 3e7, 2e8, 9e8]
ENTRIES = [2000.0, 500.0, 8000.0, 1000.0, 4000.0, 100.0]


def timings(fixed: float, rate: float, entry: float = 0.0) -> list[Sample]:
    return [
        Sample(Features(n, entries if entry else 0.0), fixed + n / rate + entries * entry)
        for n, entries in zip(BYTES, ENTRIES)
    ]


def test_constants_come_back():
    stage = fit_stage(timings(4e-6, 3e12))
    assert stage.fixed_us == pytest.approx(4.0)
    assert stage.bytes_per_second == pytest.approx(3e12)
    assert stage.ns_per_entry == 0 and stage.samples == 6
    assert stage.worst_error == pytest.approx(0, abs=1e-9)


def test_the_second_feature_comes_back():
    stage = fit_stage(timings(4e-6, 3e12, 2e-9))
    assert stage.fixed_us == pytest.approx(4.0)
    assert stage.bytes_per_second == pytest.approx(3e12)
    assert stage.ns_per_entry == pytest.approx(2.0)
    assert stage.seconds(1e6, 1000) == pytest.approx(4e-6 + 1e6 / 3e12 + 2e-6)


def test_small_times_weigh_as_much_as_large_ones():
    """One sample of each size, 20% off in turn: the relative error is spread, not left to the small ones."""
    noisy = [
        Sample(sample.features, sample.seconds * (1.2 if place % 2 else 0.8))
        for place, sample in enumerate(timings(4e-6, 3e12))
    ]
    stage = fit_stage(noisy)
    assert stage.worst_error is not None and 0.1 < stage.worst_error < 0.35
    small = noisy[0]
    assert abs(stage.seconds(small.features.bytes) / small.seconds - 1) < 0.35


def test_what_does_not_grow_has_no_rate():
    stage = fit_stage([Sample(Features(n), 5e-6) for n in BYTES])
    assert stage.bytes_per_second is None and stage.fixed_us == pytest.approx(5.0)


def test_nothing_is_negative():
    falling = [Sample(Features(n), 1e-3 / (1 + n / 1e6)) for n in BYTES]
    stage = fit_stage(falling)
    assert stage.bytes_per_second is None and stage.fixed_us > 0
    through_zero = [Sample(Features(n), max(n / 1e12 - 1e-8, 1e-9)) for n in BYTES]
    assert fit_stage(through_zero).fixed_us == 0


def test_one_size_alone_gives_its_time():
    stage = fit_stage([Sample(Features(1e6, 50.0), 3e-6)])
    assert stage.fixed_us == pytest.approx(3.0) and stage.bytes_per_second is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_times(seconds):
    with pytest.raises(InputError, match="not above 0"):
        fit_stage([Sample(Features(1.0), seconds)])


def test_bad_samples():
    with pytest.raises(InputError, match="without samples"):
        fit_stage([])
    with pytest.raises(InputError, match="there is no stage 'scna'"):
        fit_stages({"scna": timings(1e-6, 1e12)})


def test_stages_and_where_estimates_are_made():
    some = timings(1e-6, 1e12)
    stages = fit_stages({"attend": some, "scan": some, "full": []})
    assert stages.estimation == "in_attend" and stages.full is None
    assert stages.scan is not None and stages.scan.bytes_per_second == pytest.approx(1e12)
    assert fit_stages({"attend": some, "estimate": some}).estimation == "beside_fetch"
    assert fit_stages({"attend": some}, "beside_fetch").estimation == "beside_fetch"
    assert fit_stages({}).estimation == "beside_fetch"


def test_stages_known_already_are_taken_as_they_are():
    some, known = timings(1e-6, 1e12), {"scan": Stage(fixed_us=7.0), "update": Stage()}
    stages = fit_stages({"attend": some, "scan": some}, known=known)
    assert stages.scan == known["scan"] and stages.update == Stage() and stages.attend is not None
    with pytest.raises(InputError, match="there is no stage 'scna'"):
        fit_stages({}, known={"scna": Stage()})


@given(
    st.integers(1, 3),
    st.lists(st.floats(-5, 5, width=32), min_size=24, max_size=24),
    st.lists(st.floats(-5, 5, width=32), min_size=8, max_size=8),
)
def test_no_feasible_point_is_better(columns, entries, target):
    """Against the optimality conditions: the gradient is 0 where x > 0 and not negative where x = 0."""
    matrix = np.array(entries).reshape(8, 3)[:, :columns]
    wanted = np.array(target)
    found = nonnegative_least_squares(matrix, wanted)
    assert (found >= 0).all()
    gradient = matrix.T @ (matrix @ found - wanted)
    scale = 1 + np.abs(matrix).max(0) * np.linalg.norm(wanted)
    assert (gradient / scale > -1e-6).all()
    assert (np.abs(gradient / scale)[found > 0] < 1e-6).all()
