"""The check of the kernels before they decode: what passes, what fails, and what runs then."""

from __future__ import annotations

import pytest
import torch
from runtime_model import live_plan, loaded_tiny, random_ids

pytest.importorskip("triton")
from kvtune.errors import InputError, RunError
from kvtune.kernels import attend, choose, query_lists, quest_pages, scan
from kvtune.models import LoadedModel
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.runtime import kernel_check
from kvtune.runtime.engine import EngineOptions, open_engine
from kvtune.runtime.kernel_check import check_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = EngineOptions(0.1, 1300)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_tiny(DEVICE, windows=(None, 40, None))


@pytest.fixture(autouse=True)
def nothing_checked_yet(monkeypatch):
    monkeypatch.setattr(kernel_check, "_checked", {})


class Broken:
    """A kernel that cannot be launched."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure

    def __getitem__(self, grid):
        raise self.failure


class CompilerError(Exception):
    """As Triton's: its text begins with a place in the source."""

    error_message = "Cannot make_shape_compatible"


@pytest.mark.parametrize(
    ("name", "offload"),
    [
        ("wave_index", "none"),
        ("wave_index", "cpu"),
        *((n, "none") for n in ("quest", "ctkvr", "streaming", "full")),
    ],
)
def test_sound_kernels_agree_with_the_policies(loaded, name, offload, monkeypatch):
    errors, real = [], kernel_check._step_error
    monkeypatch.setattr(kernel_check, "_step_error", lambda *given: errors.append(real(*given)) or errors[-1])
    for plan in (live_plan(name), Plan(get_policy(name), dense_layers=(0,))):
        kernel_check._checked.clear()
        assert check_kernels(loaded, plan, offload) is None
    # On a GPU k-means need not cluster twice alike.
    assert len(errors) == (4 if name == "full" else 5) and max(errors) < (1e-4 if DEVICE == "cpu" else 0.05)


def test_a_shape_is_checked_once(loaded, monkeypatch):
    checked, real = [], kernel_check._check_layer
    monkeypatch.setattr(
        kernel_check,
        "_check_layer",
        lambda policy, *rest: checked.append(policy.name) or real(policy, *rest),
    )
    check_kernels(loaded, live_plan("wave_index"))
    assert checked == ["wave_index", "full"]  # layers 0 and 2 alike, 1 in its window
    check_kernels(loaded, Plan(get_policy("wave_index", {"retrieval": 0.3})))
    assert len(checked) == 2
    check_kernels(loaded, live_plan("wave_index"), "cpu")
    check_kernels(loaded_tiny(DEVICE), live_plan("wave_index").with_layer(1, sink=2))
    assert checked[2:] == ["wave_index", "full"]


@pytest.mark.parametrize(
    ("plan", "module", "kernel"),
    [
        ("wave_index", attend, "_exact_kernel"),
        ("wave_index", attend, "_estimate_kernel"),
        ("wave_index", attend, "_merge_kernel"),
        ("wave_index", scan, "_scan_kernel"),
        ("wave_index", choose, "_cut_kernel"),
        ("quest", quest_pages, "_page_kernel"),
        ("ctkvr", query_lists, "_probe_kernel"),
    ],
)
def test_a_kernel_that_fails_is_a_reason(loaded, monkeypatch, plan, module, kernel):
    monkeypatch.setattr(module, kernel, Broken(RuntimeError("out of resource: shared memory\nmore")))
    said = f"the kernels for {plan} fail here (RuntimeError: out of resource: shared memory)"
    assert check_kernels(loaded, live_plan(plan)) == said


def test_a_compiler_says_what_it_says(loaded, monkeypatch):
    monkeypatch.setattr(attend, "_exact_kernel", Broken(CompilerError("at 5:8:\n    x = y\n")))
    assert check_kernels(loaded, live_plan("streaming")).endswith(
        "(CompilerError: Cannot make_shape_compatible)"
    )


@pytest.mark.parametrize("wrong", [lambda out: out.mul_(1.2), lambda out: out.fill_(torch.nan)])
def test_wrong_results_are_a_reason(loaded, monkeypatch, wrong):
    right = attend.SparseAttention.__call__

    def call(self, queries, keys, values, rows, out, *rest, **options):
        right(self, queries, keys, values, rows, out, *rest, **options)
        wrong(out)

    monkeypatch.setattr(attend.SparseAttention, "__call__", call)
    assert "do not compute here what they should" in check_kernels(loaded, live_plan("quest"))


def test_auto_falls_back_with_a_note(loaded, monkeypatch):
    monkeypatch.setattr(attend, "_exact_kernel", Broken(RuntimeError("no kernel image")))
    reason = check_kernels(loaded, live_plan("wave_index"))
    monkeypatch.setattr(kernel_check, "check_kernels", lambda *given: reason)
    monkeypatch.setattr(LoadedModel, "device", torch.device("cuda"))
    engine = open_engine("auto", loaded, live_plan("wave_index"), OPTIONS)
    assert engine.name == "torch"
    assert engine.notes == [
        "the torch engine runs: the kernels for wave_index fail here (RuntimeError: no kernel image)"
    ]
    monkeypatch.setattr(kernel_check, "check_kernels", lambda *given: None)
    assert open_engine("auto", loaded, live_plan("wave_index"), OPTIONS).name == "fused"


def test_fused_on_request_is_refused_in_a_sentence(loaded, monkeypatch):
    monkeypatch.setattr(attend, "_exact_kernel", Broken(RuntimeError("no kernel image")))
    with pytest.raises(RunError, match="the fused engine: the kernels for wave_index fail here") as caught:
        open_engine("fused", loaded, live_plan("wave_index"), OPTIONS)
    assert caught.value.hint == "use --engine torch" and caught.value.exit_code == 1
    with pytest.raises(InputError, match="no kernels for policy 'magicpig'"):
        open_engine("fused", loaded, live_plan("magicpig"), OPTIONS)


def test_the_check_leaves_the_model_alone(loaded):
    with open_engine("fused", loaded, live_plan("streaming"), OPTIONS) as engine:
        engine.feed(random_ids(300))
        assert not engine.built and engine.length == 300
