"""A decode step's kernels by stage: every kernel has one, and times add up by it."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fused_case import DEVICE
from runtime_model import SAMPLE, live_plan, loaded_tiny, single
from torch.autograd import DeviceType

pytest.importorskip("triton")
import kvtune.kernels
from kvtune.hardware.cost import TERMS
from kvtune.runtime.live import live
from kvtune.runtime.stage_times import COUNTED, MODEL, STAGES, STEPS, decode_stages, kernels_of, stage_seconds


def launched() -> set[str]:
    """What the modules of ``kvtune.kernels`` launch: ``kernel[grid](…)``."""
    names = set()
    for path in Path(kvtune.kernels.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                assert isinstance(node.func.value, ast.Name), path
                names.add(node.func.value.id)
    return names


def test_every_kernel_has_a_stage_of_the_cost_model():
    assert set(STAGES) == launched()
    assert set(STAGES.values()) <= set(TERMS) and MODEL not in TERMS


def test_times_add_up_by_stage_and_what_is_not_ours_is_the_models():
    kernels = [("_exact_kernel", 30.0), ("gemm_bf16", 500.0), ("_merge_kernel", 2.0), ("Memcpy DtoD", 1.0)]
    assert stage_seconds(kernels) == pytest.approx({"attend": 32e-6, MODEL: 501e-6})
    assert stage_seconds([]) == {}


def test_only_what_took_place_on_the_gpu_counts():
    def event(name, device, microseconds):
        time = SimpleNamespace(elapsed_us=lambda: microseconds)
        return SimpleNamespace(name=name, device_type=device, time_range=time)

    events = [event("_scan_kernel", DeviceType.CUDA, 4.0), event("cudaGraphLaunch", DeviceType.CPU, 9.0)]
    assert kernels_of(events) == [("_scan_kernel", 4.0)]


class Steps:
    """A decoder that answers token t with t + 1, and a profiler of its steps."""

    def __init__(self, seen_in_graph: bool = True, seen_at_all: bool = True) -> None:
        self.seen = {"graph": seen_in_graph, "kernels": seen_at_all}
        self.fed: list[tuple[str, int]] = []
        self.lengths = [100]
        self.loaded = SimpleNamespace(geometry=SimpleNamespace(max_positions=100 + STEPS))

    def _step(self, kind: str, tokens: torch.Tensor) -> torch.Tensor:
        self.fed.append((kind, int(tokens)))
        return torch.nn.functional.one_hot(tokens + 1, 20).float()

    def step(self, tokens):
        return self._step("graph", tokens)

    def step_through(self, attend, tokens):
        return self._step("kernels", tokens)

    def profiled(self, step):
        step()
        kind, token = self.fed[-1]
        return {"attend": 1.0 + token, MODEL: 10.0} if self.seen[kind] else {}


LOGITS = torch.nn.functional.one_hot(torch.tensor(3), 20).float()


def test_steps_are_greedy_and_the_first_is_not_counted():
    steps = Steps()
    found, refused = decode_stages(steps, LOGITS, steps.profiled)
    assert steps.fed == [("graph", 3 + number) for number in range(STEPS)]
    assert found == {"attend": sum(1.0 + 3 + number for number in range(1, STEPS)), MODEL: 10.0 * COUNTED}
    assert refused == ""


def test_where_the_profiler_sees_no_graph_steps_run_kernel_by_kernel():
    steps = Steps(seen_in_graph=False)
    found, _ = decode_stages(steps, LOGITS, steps.profiled)
    assert [kind for kind, _ in steps.fed] == ["graph"] + ["kernels"] * COUNTED
    assert found[MODEL] == 10.0 * COUNTED


def test_without_kernels_or_profiler_the_reason_is_said():
    steps = Steps(seen_in_graph=False, seen_at_all=False)
    assert decode_stages(steps, LOGITS, steps.profiled) == ({}, "the profiler saw no kernels")

    def refuses(step):
        raise RuntimeError("no CUPTI")

    assert decode_stages(steps, LOGITS, refuses) == ({}, "no CUPTI")
    steps.lengths = [101]
    assert decode_stages(steps, LOGITS, steps.profiled) == ({}, "the model takes no further positions")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("policy", "offload", "stages"),
    [
        ("wave_index", "cpu", {"scan", "choose", "id_copy", "lookup", "fetch", "update"}),
        ("quest", "none", {"scan", "choose", "id_copy"}),
        ("ctkvr", "none", {"scan", "choose", "id_copy"}),
    ],
)
def test_a_live_run_tells_its_stages(policy, offload, stages):
    loaded = loaded_tiny(DEVICE)
    document = live(
        loaded, [single(SAMPLE)], live_plan(policy), decode=4, engine="fused", offload=offload, free=False
    )
    found = document["stages_ms"]
    assert stages | {"attend", "append", MODEL} <= set(found) and min(found.values()) > 0
    assert not any("by stage" in note for note in document["notes"])
