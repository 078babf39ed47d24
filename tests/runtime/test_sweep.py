"""A live run at several settings, its rows and its page."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from runtime_model import SAMPLE, live_plan, loaded_tiny, single

from kvtune.errors import InputError
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.runtime import live
from kvtune.runtime.sweep import settings_of, sweep
from kvtune.runtime.sweep_page import render_sweep

OPTIONS = {"decode": 4, "free": False}
SAMPLES = [single(SAMPLE, 1)]


@pytest.fixture(scope="module")
def loaded():
    return loaded_tiny()


def test_what_names_stand_for():
    plan = Plan(
        get_policy("wave_index", {"sink": 8}), (0,), {1: {"retrieval": 0.5, "local": 32}, 2: {"retrieval": 1}}
    )
    parameter, found = settings_of(plan, 0.1, "budget", [0.01, "0.02"])
    assert parameter == "retrieval" and [s.value for s in found] == [0.01, 0.02]
    assert found[1].plan.policy.parameters() == {**plan.policy.parameters(), "retrieval": 0.02}
    assert found[0].plan.overrides == {1: {"local": 32}} and found[0].plan.dense_layers == (0,)
    assert {s.cache_fraction for s in found} == {0.1}
    parameter, found = settings_of(plan, 0.1, "cache", [0.2, 1])
    assert parameter == "cache_fraction" and [s.cache_fraction for s in found] == [0.2, 1.0]
    assert all(s.plan is plan for s in found)
    parameter, found = settings_of(plan, 0.1, "estimate", ["all", "budget"])
    assert parameter == "estimate" and [s.plan.policy.estimate for s in found] == ["all", "budget"]


@pytest.mark.parametrize(
    ("policy", "name", "values", "said"),
    [
        ("full", "budget", [1], "no budget"),
        ("quest", "retrieval", [0.1], "unknown parameter"),
        ("quest", "budget", ["many"], "must be int"),
        ("quest", "budget", [], "no value"),
        ("wave_index", "budget", [2.0], r"\[0, 1\]"),
        ("quest", "cache", [0.0], "outside"),
        ("quest", "cache", ["half"], "fractions"),
        ("quest", "cache", [True], "fractions"),
    ],
)
def test_what_cannot_be_swept(policy, name, values, said):
    with pytest.raises(InputError, match=said):
        settings_of(Plan(get_policy(policy)), 0.1, name, values)


def test_each_row_is_a_live_run(loaded, tmp_path):
    plan = live_plan("quest")
    document = sweep(
        loaded, SAMPLES, plan, "budget", [96, 400], cache_fraction=0.1, out=tmp_path / "s", **OPTIONS
    )
    assert document["parameter"] == "token_budget" and [row["value"] for row in document["rows"]] == [96, 400]
    for row in document["rows"]:
        policy = get_policy("quest", {**plan.policy.parameters(), "token_budget": row["value"]})
        alone = live(loaded, SAMPLES, policy, cache_fraction=0.1, **OPTIONS)
        for key in ("kl", "top1", "hit_ratio", "gpu_bytes"):
            assert row[key] == alone[key]
        forced = alone["forecast_hit_ratio"]["forced"]
        assert row["forecast"]["page"] == forced["page"] is not None
    assert document["rows"][0]["kl"]["mean"] > document["rows"][1]["kl"]["mean"]
    assert json.loads((tmp_path / "s" / "sweep.json").read_text()) == json.loads(json.dumps(document))
    page = (tmp_path / "s" / "sweep.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3 and "forecast from full attention" in page
    with pytest.raises(InputError, match="exists"):
        sweep(loaded, SAMPLES, plan, "budget", [96], out=tmp_path / "s", **OPTIONS)


def test_a_cache_sweep_changes_the_hits_alone(loaded):
    rows = sweep(loaded, SAMPLES, live_plan("quest"), "cache", [0.01, 0.1, 1.0], **OPTIONS)["rows"]
    assert rows[0]["kl"] == rows[1]["kl"] == rows[2]["kl"]
    pages = [row["hit_ratio"]["page"] for row in rows]
    assert pages[0] < pages[1] <= pages[2]


def test_an_interrupted_sweep_keeps_what_is_done(loaded, tmp_path, monkeypatch):
    runs = []

    def stopped(*arguments, **options):
        runs.append(options)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return live(*arguments, **options)

    monkeypatch.setattr("kvtune.runtime.sweep.live", stopped)
    document = sweep(
        loaded, SAMPLES, live_plan("quest"), "budget", [96, 200, 400], out=tmp_path / "s", **OPTIONS
    )
    assert document["interrupted"] is True and len(document["rows"]) == 1
    assert "interrupted" in (tmp_path / "s" / "sweep.html").read_text(encoding="utf-8")
    runs.append(None)
    monkeypatch.setattr("kvtune.runtime.sweep.live", lambda *a, **o: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        sweep(loaded, SAMPLES, live_plan("quest"), "budget", [96], out=tmp_path / "none", **OPTIONS)
    assert not (tmp_path / "none").exists()


def row(value, page):
    quantiles = {"p50": 2.0, "p95": 3.0}
    return {
        "value": value,
        "kl": {"mean": 0.1, "p95": 0.2},
        "delta_nll": {"mean": None, "low": None, "high": None},
        "top1": 1.0,
        "hit_ratio": {"page": page},
        "forecast": {"page": page, "difference_points": None},
        "step_ms": quantiles,
        "full_step_ms": quantiles,
        "gpu_bytes": None,
    }


@pytest.mark.parametrize(
    ("values", "page", "plots"),
    [([0.2, 0.1], 0.5, 3), ([0, 5], 0.5, 3), ([7], 0.5, 3), ([1, 2], None, 2), (["all", "budget"], 0.5, 0)],
)
def test_pages_are_well_formed(values, page, plots):
    """Unordered, zero and single values, a policy without accesses, and values that are no numbers."""
    document = {
        "model": "m<1>",
        "policy": "p",
        "parameter": "x",
        "interrupted": False,
        "rows": [row(v, page) for v in values],
    }
    html = render_sweep(document)
    assert html.count("<svg") == plots and "m&lt;1&gt;" in html
    body = html[html.index("<main>") : html.index("</main>") + 7]
    ElementTree.fromstring(body)
