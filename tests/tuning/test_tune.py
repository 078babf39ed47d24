"""The search end to end on a small trace: choice, held-out check, resume, constraints."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from kvtune.errors import Infeasible, InputError
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.traces import open_trace
from kvtune.tuning import Bench, Constraints, shipped_default, tune
from kvtune.tuning.tune import split, verdict


@pytest.fixture(scope="module")
def tuned(clustered_trace, tmp_path_factory):
    out = tmp_path_factory.mktemp("study")
    return tune(clustered_trace, out, trials=8), out


def test_document_has_the_stable_keys(tuned):
    document = json.loads(json.dumps(tuned[0].document, allow_nan=False))
    assert set(document) == {"pareto", "chosen", "default", "held_out", "trials"}
    assert {"chosen", "default"} <= set(document["held_out"])
    assert set(document["trials"]) == {"complete", "pruned", "failed"}
    assert sum(document["trials"].values()) == 8
    for row in [*document["pareto"], document["chosen"], document["default"]]:
        assert {"params", "output_error", "read_bytes_per_step", "hit_ratio"} == set(row)
        assert {"mean", "p95"} == set(row["output_error"])


def test_choice_beats_or_equals_the_default_at_no_more_bytes(tuned):
    search = tuned[0].search
    assert search["chosen"].read_bytes_per_step <= search["default"].read_bytes_per_step
    assert search["chosen"].error_mean <= search["default"].error_mean


def test_held_out_samples_were_not_searched(tuned):
    assert tuned[0].search_samples == (0, 1) and tuned[0].held_out_samples == (2,)


def test_pareto_front_has_no_dominated_point(tuned):
    front = [(r["read_bytes_per_step"], r["output_error"]["mean"]) for r in tuned[0].document["pareto"]]
    assert front == sorted(front)
    assert all(b[1] < a[1] for a, b in itertools.pairwise(front))


def test_trials_are_the_total_over_resumes(clustered_trace, tuned):
    result, out = tuned
    again = tune(clustered_trace, out, trials=8)
    assert again.document == result.document
    more = tune(clustered_trace, out, trials=10)
    assert sum(more.document["trials"].values()) == 10


def test_a_study_of_something_else_is_not_continued(clustered_trace, tuned):
    with pytest.raises(InputError, match="seed"):
        tune(clustered_trace, tuned[1], trials=8, seed=5)


def test_fixed_parameters_are_never_searched(clustered_trace, tmp_path):
    fixed = {"spread_correction": 0.0, "head_shares": "", "sink": 8}
    result = tune(clustered_trace, tmp_path, trials=4, fixed=fixed)
    plans = [result.chosen.params(), *(row["params"] for row in result.document["pareto"])]
    for params in plans:
        assert {name: params[name] for name in fixed} == fixed
        for changed in params.get("overrides", {}).values():
            assert not set(changed) & set(fixed)
    with pytest.raises(InputError, match="begun with fixed"):
        tune(clustered_trace, tmp_path, trials=4, fixed={"sink": 8})
    with pytest.raises(InputError, match="sinks"):
        tune(clustered_trace, tmp_path / "other", trials=1, fixed={"sinks": 8})


def test_nothing_feasible_is_said_and_nothing_chosen(clustered_trace, tmp_path):
    """An infeasible 'best' trial must never be returned (optuna#6825)."""
    with pytest.raises(Infeasible, match="none of 3 trials") as raised:
        tune(clustered_trace, tmp_path, trials=3, constraints=Constraints(max_error=1e-9))
    assert raised.value.exit_code == 3 and "nearest" in (raised.value.hint or "")


def test_max_error_alone_finds_the_cheapest(clustered_trace, tmp_path):
    result = tune(
        clustered_trace, tmp_path, trials=6, constraints=Constraints(max_error=0.9), per_layer=False
    )
    assert result.search["chosen"].error_mean <= 0.9
    rows = [r for r in result.document["pareto"] if r["output_error"]["mean"] <= 0.9]
    assert result.search["chosen"].read_bytes_per_step == min(r["read_bytes_per_step"] for r in rows)


def _worker(path: Path, out: Path) -> None:
    tune(open_trace(path), out, trials=8, per_layer=False)


def test_parallel_studies_share_one_journal(clustered_trace, tmp_path):
    """Two processes on one study do not lock each other out (optuna#820 was SQLite's way to fail)."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_worker, args=(clustered_trace.path, tmp_path)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert sum(tune(clustered_trace, tmp_path, trials=8).document["trials"].values()) >= 8


@pytest.mark.parametrize(
    "bad", [{"max_error": 0}, {"max_read_bytes": -1}, {"min_hit_ratio": 1.5}, {"max_error": float("nan")}]
)
def test_senseless_constraints_are_refused(bad):
    with pytest.raises(InputError):
        Constraints(**bad)


def test_one_sample_cannot_be_split(clustered_trace, monkeypatch):
    monkeypatch.setattr(type(clustered_trace), "n_samples", property(lambda self: 1))
    with pytest.raises(InputError, match="at least 2 samples"):
        split(clustered_trace, 0.3)


def test_unknown_policy_and_counts_are_refused(clustered_trace, tmp_path):
    with pytest.raises(InputError, match="unknown policy"):
        tune(clustered_trace, tmp_path, policy="wave")
    with pytest.raises(InputError, match="--trials"):
        tune(clustered_trace, tmp_path, trials=0)
    with pytest.raises(InputError, match="--held-out"):
        tune(clustered_trace, tmp_path, held_out=1.0)


def test_bench_measures_once_and_agrees_with_a_fresh_one(clustered_trace):
    default = shipped_default()
    bench = Bench(clustered_trace, [0, 1], clustered_trace.layers)
    warm = bench.score(Plan(get_policy("wave_index", {"retrieval": 0.1})), 0.05)
    first = bench.score(default.plan, 0.05)
    measured = len(bench._outcomes)
    assert bench.score(default.plan, 0.05) == first and len(bench._outcomes) == measured
    assert Bench(clustered_trace, [0, 1], clustered_trace.layers).score(default.plan, 0.05) == first
    assert warm.read_bytes_per_step > first.read_bytes_per_step


def test_windowed_layer_is_dense_and_costs_its_window(clustered_trace):
    bench = Bench(clustered_trace, [0], clustered_trace.layers)
    outcome = bench.outcome(shipped_default().plan, 0, 2)
    assert outcome.errors.max() < 1e-5
    page = clustered_trace.layer_info(2).page_bytes
    assert set(outcome.read_bytes.tolist()) == {2 * 8 * page}


def test_pooled_errors_leave_windowed_layers_out_and_bytes_do_not(clustered_trace):
    plan = shipped_default().plan
    whole = Bench(clustered_trace, [0, 1], clustered_trace.layers)
    served, windowed = (Bench(clustered_trace, [0, 1], layers) for layers in ([0, 1], [2]))
    found, alone = whole.score(plan, 0.05), served.score(plan, 0.05)
    assert found.unit_errors == alone.unit_errors and len(found.unit_errors) == 4
    assert (found.error_mean, found.error_p95) == (alone.error_mean, alone.error_p95)
    dense = windowed.score(plan, 0.05)
    assert dense.error_mean < 1e-5 and len(dense.unit_errors) == 2
    both = alone.read_bytes_per_step + dense.read_bytes_per_step
    assert found.read_bytes_per_step == pytest.approx(both) and dense.read_bytes_per_step > 0
    intervals, without = whole.intervals(plan, 0.05), served.intervals(plan, 0.05)
    for name in ("error_mean", "error_p95"):
        assert intervals[name] == without[name]


def test_verdict_needs_an_interval_off_zero_and_no_more_bytes(clustered_trace):
    bench = Bench(clustered_trace, [0, 1], clustered_trace.layers)
    default = bench.score(shipped_default().plan, 0.05)
    full = bench.score(Plan(get_policy("full")), 0.05)
    difference, winner = verdict(full, default)
    assert difference["high"] <= 0 and winner == "tie"  # far better, but for more bytes
    assert verdict(default, full)[1] in ("default", "tie")
    assert verdict(default, default)[1] == "tie"
    assert np.isclose(verdict(default, default)[0]["value"], 0)
