"""Steps to be timed: made of parts they are the runtime's own, and what they moved is counted right."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from kvtune.geometry import ModelGeometry
from kvtune.hardware import step_probes, wave_traffic
from kvtune.hardware.step_probes import RandomIndex, build_steps, time_steps
from kvtune.hardware.step_settings import StepSetting
from kvtune.hardware.wave_steps import WaveSteps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GEOMETRY = ModelGeometry(
    n_layers=1, n_heads=4, n_kv_heads=2, head_dim=16, value_dim=16, dtype="float32", max_positions=4096,
    scaling=0.25, windows=(None,), softcaps=(None,), sinks=(False,),
)  # fmt: skip
KEPT = StepSetting(1, 1200, 0.1, 0.3)
CACHED = StepSetting(1, 1200, 0.1, 0.3, cache=0.08, keep=0.5)
ALL = {"append", "scan", "choose", "id_copy", "estimate", "lookup", "fetch"}


def built(setting: StepSetting, monkeypatch, rounds: int) -> WaveSteps:
    """Two layers in turn."""
    monkeypatch.setattr(step_probes, "layers_in_turn", lambda *_: 2)
    monkeypatch.setattr(step_probes, "_LEAST_CALLS", 2 * rounds)
    monkeypatch.setattr(step_probes, "_LEAST_ROUNDS", rounds)
    torch.manual_seed(0)
    return build_steps(setting, DEVICE, GEOMETRY, step_probes._noise)


@pytest.mark.parametrize("setting", [KEPT, CACHED])
def test_all_parts_together_are_the_runtimes_step(setting, monkeypatch):
    steps = built(setting, monkeypatch, rounds=1)
    results = []
    for body in (steps.whole, steps.partly(ALL)):
        for layer in steps.layers:
            layer.out.fill_(torch.nan)
        body()
        results.append((torch.stack([layer.out.clone() for layer in steps.layers]), steps.resident.clone()))
    (out, resident), (mine, my_resident) = results
    assert out.isfinite().all() and not torch.equal(out[0], out[1])
    torch.testing.assert_close(mine, out)
    assert torch.equal(resident, my_resident)
    assert torch.equal(resident[..., 3], steps.first[..., 3] + 1)


def test_stages_left_out_leave_what_the_others_made(monkeypatch):
    steps = built(KEPT, monkeypatch, rounds=1)
    steps.whole()
    out = [layer.out.clone() for layer in steps.layers]
    for parts in ({"choose", "id_copy", "estimate"}, set()):
        for layer in steps.layers:
            layer.out.fill_(torch.nan)
        steps.partly(parts)()
        for layer, before in zip(steps.layers, out):
            # Without the append, the token that this step appended is not attended.
            torch.testing.assert_close(layer.out, before, rtol=0.2, atol=0.2)
            assert not torch.equal(layer.out, before)
    assert torch.equal(steps.resident, steps.first)


def test_traffic_is_what_the_layers_chose(monkeypatch):
    steps = built(KEPT, monkeypatch, rounds=1)
    steps.whole()
    traffic, counts, info = steps.traffic(), KEPT.policy.counts(1200), GEOMETRY.layer(0)
    assert traffic.scan_bytes == 2 * counts.n_centroids * 64
    assert traffic.estimation_bytes == 2 * counts.es * 68
    assert traffic.blocks == 2 * counts.nprobe and traffic.fetched == 0
    tokens = 0
    for layer in steps.layers:
        for unit, blocks in enumerate(layer.choice.retrieved.tolist()):
            tokens += sum(int(layer.sizes[unit, block]) for block in blocks if block >= 0)
    assert traffic.attended == pytest.approx((tokens / 2 + 2 * 69) * info.token_bytes)
    planned = wave_traffic(GEOMETRY, 1200, KEPT.policy)[0]
    assert planned.scan_bytes == traffic.scan_bytes and planned.blocks == traffic.blocks
    assert planned.attended == pytest.approx(traffic.attended, rel=0.3)


def test_misses_are_those_counted_since(monkeypatch):
    steps = built(CACHED, monkeypatch, rounds=2)
    steps.whole()
    assert steps.missed_shares()[0] > 0.5, "an empty cache misses"
    steps.count_from_now()
    assert steps.missed_shares() == (0.0, 0.0)
    hits = steps._counters()
    steps.whole()
    found, asked = (steps._counters() - hits).double().unbind(1)
    share = 1 - found / asked
    assert steps.missed_shares() == pytest.approx((float(share[1]), float(share[2])))
    traffic = steps.traffic()
    assert 0 < traffic.fetched <= traffic.missed_bytes < traffic.exact_bytes


def test_differences_add_up_to_the_step(monkeypatch):
    """With a clock that knows a time for each stage."""
    costs = {name: 2.0**place for place, name in enumerate(sorted(ALL))}

    class Steps:
        batch, calls = 1, 1
        info = GEOMETRY.layer(0)

        def __init__(self, offloaded: bool) -> None:
            self.offloaded = offloaded
            self.traffic = lambda: wave_traffic(GEOMETRY, 1200, KEPT.policy)[0]

        def partly(self, parts):
            return parts

    def seconds(steps, device, repeats, parts=None):
        kept = ALL if steps.offloaded else ALL - {"lookup", "fetch"}
        return 100.0 + sum(costs[name] for name in (kept if parts is None else set(parts) & kept))

    monkeypatch.setattr(step_probes, "step_seconds", seconds)
    kept = time_steps(Steps(False), DEVICE, 1)
    stages = ALL - {"lookup", "fetch"}
    assert dict(kept.seconds) == {**{name: costs[name] for name in stages}, "attend": 100.0}
    assert sum(kept.seconds.values()) == kept.whole and set(kept.features) == set(kept.seconds)
    cached = time_steps(Steps(True), DEVICE, 1)
    assert cached.seconds == {"fetch": costs["fetch"], "lookup": costs["lookup"] + costs["estimate"]}
    assert {"lookup", "fetch", "scan"} <= set(cached.features)
    assert not {"estimate", "update"} & set(cached.features)


def test_random_clusters_are_as_many_as_those_of_keys():
    policy = RandomIndex(retrieval=0.05)
    keys = torch.randn(2, 1500, 16)
    index = policy.build(keys, keys[..., :8], keys[:, None, :0], GEOMETRY.layer(0))
    sizes = index.clusters.sizes
    assert sizes.shape == (2, policy.counts(1500).n_centroids)
    assert (sizes.sum(1) == 1500 - 68).all() and (sizes > 0).all() and sizes.float().std() > 2
    assert torch.equal(index.offsets.diff(dim=1), sizes)
    assert index.order.shape == (2, 1500 - 68) and index.clusters.value_sums.shape[2] == 8
