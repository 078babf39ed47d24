"""Stages fitted to whole steps: constants come back, the whole counts most, and the optimum is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.errors import InputError
from kvtune.hardware import Features, Stage, StepSample, fit_steps

TRUE = {
    "scan": Stage(fixed_us=3.0, bytes_per_second=3e12),
    "choose": Stage(fixed_us=6.0, bytes_per_second=2e12, ns_per_entry=0.01),
    "attend": Stage(fixed_us=5.0, bytes_per_second=2.5e12, ns_per_entry=1.0),
    "append": Stage(),
}


def steps(count: int = 12, seed: int = 0) -> list[StepSample]:
    """Steps of the true stages at random sizes; the append costs nothing."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        sizes = {
            "scan": Features(float(10 ** generator.uniform(5, 8.5))),
            "choose": Features(float(10 ** generator.uniform(4, 7)), float(10 ** generator.uniform(1, 6))),
            "attend": Features(float(10 ** generator.uniform(6, 9)), float(10 ** generator.uniform(2, 4))),
            "append": Features(float(generator.integers(1, 9) * 1024)),
        }
        seconds = {name: TRUE[name].seconds(one.bytes, one.entries) for name, one in sizes.items()}
        found.append(StepSample(sizes, seconds, sum(seconds.values())))
    return found


def predicted(stages: dict[str, Stage], sample: StepSample) -> float:
    return sum(stages[name].seconds(one.bytes, one.entries) for name, one in sample.features.items())


def test_constants_come_back():
    stages, worst = fit_steps(steps())
    assert set(stages) == set(TRUE) and worst < 1e-4
    for name in ("scan", "choose", "attend"):
        assert stages[name].fixed_us == pytest.approx(TRUE[name].fixed_us, rel=1e-2)
        assert stages[name].bytes_per_second == pytest.approx(TRUE[name].bytes_per_second, rel=1e-2)
        assert stages[name].samples == 12
    assert stages["attend"].ns_per_entry == pytest.approx(1.0, rel=2e-2)
    assert stages["append"].seconds(8192) == pytest.approx(0, abs=1e-8)


def test_a_difference_below_zero_is_no_time():
    samples = [replace(one, seconds={**one.seconds, "append": -1e-7}) for one in steps()]
    stages, worst = fit_steps(samples)
    assert stages["append"] == Stage(samples=12, worst_error=stages["append"].worst_error)
    assert worst < 0.01


def test_the_whole_step_counts_most():
    """Every step takes 10% more than its stages: the stages grow until the steps are nearly met."""
    samples = [replace(one, whole=1.1 * one.whole) for one in steps()]
    stages, worst = fit_steps(samples)
    errors = [predicted(stages, one) / one.whole - 1 for one in samples]
    assert worst == pytest.approx(max(abs(error) for error in errors), rel=1e-6)
    assert worst < 0.05 and np.mean(errors) > -0.03


def test_a_stage_told_apart_in_some_steps_alone():
    """Steps of which only the whole and a new stage are known: the others are known from elsewhere."""
    more = []
    for place, one in enumerate(steps(6, seed=1)):
        fetch = Features(1e6 * 3**place)
        seconds = 8e-6 + fetch.bytes / 5e10
        whole = one.whole + seconds
        more.append(StepSample({**one.features, "fetch": fetch}, {"fetch": seconds}, whole))
    stages, worst = fit_steps([*steps(), *more])
    assert worst < 1e-3 and stages["fetch"].samples == 6
    assert stages["fetch"].bytes_per_second == pytest.approx(5e10, rel=1e-2)
    assert stages["scan"].samples == 12


@settings(max_examples=15)
@given(st.integers(0, 2**16), st.sampled_from(sorted(TRUE)), st.integers(0, 2), st.floats(-0.3, 0.3))
def test_no_other_constants_are_better(seed, name, constant, change):
    """The objective, written out, at the fit and beside it."""
    generator = np.random.default_rng(seed)
    samples = [
        StepSample(
            one.features,
            {key: value * generator.uniform(0.7, 1.3) for key, value in one.seconds.items()},
            one.whole * generator.uniform(0.8, 1.2),
        )
        for one in steps(8, seed)
    ]

    def objective(stages: dict[str, Stage]) -> float:
        total = 0.0
        for one in samples:
            total += 9 * (predicted(stages, one) / one.whole - 1) ** 2
            for key, value in one.seconds.items():
                mine = stages[key].seconds(one.features[key].bytes, one.features[key].entries)
                total += ((mine - value) / one.whole) ** 2
        return total

    stages, _ = fit_steps(samples)
    best, stage = objective(stages), stages[name]
    key = ("fixed_us", "bytes_per_second", "ns_per_entry")[constant]
    old = getattr(stage, key)
    moved = stage.model_copy(update={key: (old or 1e12) * (1 + change) if key != "fixed_us" else
                                     max(old + change, 0.0)})  # fmt: skip
    assert objective({**stages, name: moved}) >= best - 1e-4 * max(best, 1.0)


def test_bad_samples():
    assert fit_steps([]) == ({}, 0.0)
    one = steps(1)[0]
    for whole in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match="not above 0"):
            fit_steps([replace(one, whole=whole)])
    with pytest.raises(InputError, match="stage 'scan' was never told apart"):
        fit_steps([replace(one, seconds={"attend": 1e-6, "choose": 1e-6, "append": 1e-6})])
