"""The step of a live run on a machine: what it read and missed, and the time that this takes."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from runtime_model import CONTEXT, SAMPLE, live_plan, loaded_tiny, single
from tiny_models import tiny_loaded

from kvtune.hardware import Hardware, StepCost, full_traffic, parse_hardware, step_cost, wave_traffic
from kvtune.hardware.calibrate import device_title
from kvtune.policies.plan import Plan
from kvtune.policies.wave_index import WaveIndex
from kvtune.profiles.hardware_presets import load_hardware, preset_names
from kvtune.runtime import live
from kvtune.runtime.step_prediction import StepPredictor, describes, live_traffic, weights_read

Found = namedtuple("Found", "document traffic cost")
ONE = single(SAMPLE)
LENGTHS = [len(CONTEXT) + 20 + step for step in range(8)] + [len(CONTEXT) + 37 + step for step in range(8)]
"""Tokens before each decode step: two turns of 8 steps, the second behind a question of 9."""


@pytest.fixture(scope="module")
def loaded():
    return loaded_tiny(windows=(None, 40, None))


@pytest.fixture(scope="module")
def machine() -> Hardware:
    return load_hardware("h200")


@pytest.fixture(scope="module")
def run(loaded, machine):
    def call(plan: Plan, **options) -> Found:
        kept = []
        predictor = StepPredictor(machine, loaded)

        def predict(measured, chosen) -> StepCost:
            kept.append(live_traffic(measured, chosen, loaded.geometry))
            return predictor(measured, chosen)

        document = live(
            loaded, [ONE], plan, decode=8, cache_fraction=0.1, free=False, predict=predict, **options
        )
        return Found(document, *kept, predict)

    return call


def mean(rows):
    return sum(rows) / len(rows)


def test_the_wave_index_reads_what_its_counts_say(run, loaded):
    """Beside RetroInfer's own counts at every step; what is retrieved and missed is the run's."""
    policy = WaveIndex(retrieval=0.1, segment=512)
    found = run(Plan(policy, dense_layers=(2,)))
    prompt, live_ratio = len(CONTEXT) + 20, found.document["hit_ratio"]
    steps = [wave_traffic(loaded.geometry, prompt, policy, step=n - prompt)[0] for n in LENGTHS]
    sparse, windowed, dense = found.traffic
    page, token = loaded.geometry.layer(0).page_bytes, loaded.geometry.layer(0).token_bytes
    assert sparse.scan_bytes == mean([step.scan_bytes for step in steps])
    assert sparse.estimation_bytes == pytest.approx(mean([step.estimation_bytes for step in steps]), rel=0.02)
    assert sparse.blocks == mean([step.blocks for step in steps])
    assert sparse.missed_bytes / page > 0
    pages = sparse.missed_bytes / (1 - live_ratio["page"]) / page
    tokens = sparse.fetched_bytes / (1 - live_ratio["token"]) / token
    resident = [2 * (policy.sink + policy.local + n + 1 - prompt) for n in LENGTHS]
    assert sparse.attended == pytest.approx((mean(resident) + tokens) * token)
    rounded = [2 * -(-(count // 2) // 8) for count in resident]
    assert sparse.exact_bytes == pytest.approx((mean(rounded) + pages) * page)
    assert windowed == full_traffic(loaded.geometry, 2000.0)[1]
    assert dense.dense and dense.exact_bytes == 2 * token * mean([n + 1 for n in LENGTHS])


ATTENDED = {"quest": 96, "streaming": 204, "oracle_topk": 68 + 100, "full": mean([n + 1 for n in LENGTHS])}
"""Tokens that a kv head attends at a step."""


@pytest.mark.parametrize("name", [*ATTENDED, "ctkvr"])
def test_any_policy_is_predicted_from_what_it_selects(run, loaded, machine, name):
    found = run(live_plan(name))
    cost = step_cost(
        machine, loaded.geometry, found.traffic, weights_bytes=weights_read(loaded), offload="none"
    )
    terms = found.document["predicted_terms_ms"]
    assert found.document["predicted_step_ms"] == 1e3 * cost.seconds
    assert sum(terms.values()) == pytest.approx(1e3 * cost.seconds + found.document["predicted_hidden_ms"])
    sparse, windowed, _ = found.traffic
    assert windowed == full_traffic(loaded.geometry, 2000.0)[1]
    if name in ATTENDED:
        tokens = sparse.attended / (2 * loaded.geometry.layer(0).token_bytes)
        # Quest attends the page being written as far as it is filled.
        assert tokens == pytest.approx(ATTENDED[name], abs=8 if name == "quest" else 1e-9)
    asks = found.document["hit_ratio"]["page"] is not None
    assert (sparse.blocks > 0) == (sparse.missed_bytes > 0) == asks == (name not in ("streaming", "full"))


def test_a_layer_without_a_log_asks_for_what_is_selected(loaded):
    """As CTkvr's kernels keep none."""
    kept = []
    live(loaded, [ONE], live_plan("ctkvr"), decode=4, free=False, predict=lambda *seen: kept.append(seen))
    run, plan = kept[0]
    logged = live_traffic(run, plan, loaded.geometry)[0]
    run.forced.layers.clear()
    alone = live_traffic(run, plan, loaded.geometry)[0]
    assert alone.missed_bytes == alone.fetched == 0 < logged.missed_bytes
    assert alone.blocks > 0 and alone.attended == pytest.approx(logged.attended, rel=0.05)


def test_a_run_without_a_forecast_says_so(loaded, machine):
    predict = StepPredictor(machine, loaded)
    document = live(loaded, [ONE], "streaming", decode=2, free=False, forecast=False, predict=predict)
    assert document["predicted_step_ms"] is None
    assert any("not predicted" in note and "no forecast" in note for note in document["notes"])


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_of_its_own_is_not_read(tied):
    loaded = tiny_loaded()
    if tied:
        loaded.model.lm_head.weight = loaded.model.model.embed_tokens.weight
    numbers = {id(p): p.numel() for p in loaded.model.parameters()}
    table = loaded.model.model.embed_tokens.weight.numel()
    assert weights_read(loaded) == 4 * (sum(numbers.values()) - (0 if tied else table))


@pytest.mark.parametrize(
    ("title", "gibibytes", "named"),
    [
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, None),
        ("NVIDIA A10G", 22.1, "a10g"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA L40", 44.4, None),
        ("NVIDIA GeForce RTX 4090", 23.6, None),
    ],
)
def test_which_machine_a_gpu_is(monkeypatch, title, gibibytes, named):
    memory = namedtuple("Properties", "total_memory")(int(gibibytes * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: title)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    device = torch.device("cuda", 0)
    same = [name for name in preset_names() if describes(load_hardware(name), device)]
    assert same == ([] if named is None else [named])


def test_a_processor_is_known_by_its_title(machine):
    device = torch.device("cpu")
    assert not describes(machine, device)
    own = {**machine.model_dump(mode="json"), "device": device_title(device)}
    assert describes(parse_hardware(own), device)
