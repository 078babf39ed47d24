"""Analyses on a GPU: no tensor is left behind on the CPU, and the results are the CPU's."""

from __future__ import annotations

import math
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from clustered_traces import write_clustered
from pretend_gpu import GPU, pretend_gpu

from kvtune.analysis import analyze
from kvtune.analysis.compare import compare
from kvtune.analysis.sensitivity import sensitivity
from kvtune.errors import InputError
from kvtune.policies import all_policies
from kvtune.traces import open_trace

MEASURES = ("recall_at_100", "attention_mass", "output_error", "effective_tokens", "read_bytes_per_step")
SETTINGS = {
    "h2o": {"recent_ratio": 0.05},
    "snapkv": {"window": 16},
    "pyramidkv": {"window": 16},
    "retrieval_attention": {"index": "ivf"},
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("devices") / "clustered"
    return open_trace(write_clustered(folder, samples=1, prompt_queries=40))


@pytest.fixture(scope="module")
def half_trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("devices") / "half"
    return open_trace(write_clustered(folder, samples=1, prompt_queries=40, dtype=torch.bfloat16))


def pretending(run):
    """``run()`` where a GPU is said to exist; Triton stays out of it."""
    with ExitStack() as stack:
        for module in ("analyze", "recordings", "sensitivity"):
            stack.enter_context(mock.patch(f"kvtune.analysis.{module}.choose_device", lambda _: GPU))
        for module in ("clustering.backends", "analysis.recall"):
            stack.enter_context(mock.patch(f"kvtune.{module}.find_spec", lambda _: None))
        stack.enter_context(pretend_gpu())
        return run()


def same(got, want, rel) -> bool:
    """Equal plain data, numbers within ``rel``; NaN equals NaN."""
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(same(got[key], want[key], rel) for key in want)
    if isinstance(want, list):
        return len(got) == len(want) and all(same(a, b, rel) for a, b in zip(got, want))
    if isinstance(want, int | float) and not isinstance(want, bool):
        return (math.isnan(want) and math.isnan(got)) or got == pytest.approx(want, rel=rel, abs=1e-6)
    return got == want


def quality(document):
    return {row["name"]: {name: row[name] for name in ("params", *MEASURES)} for row in document["policies"]}


def analysed(trace, device, policy="wave_index"):
    document = analyze(trace, policy, device=device)
    return {name: document[name] for name in (*MEASURES, "entropy", "overlap_at_100", "layers")}


def heads(trace, device):
    document = sensitivity(trace, device=device)
    return {name: document[name] for name in ("precisions", "plan", "decode_steps")}


def test_the_pretended_gpu_refuses_what_a_gpu_refuses():
    with pretend_gpu() as device:
        there, here = torch.ones(3, 2).to(device), torch.ones(3, 2)
        assert there.is_cuda and there.device == device and (there + 1).is_cuda
        assert torch.equal((there * 2).cpu(), 2 * here) and torch.zeros(2, device=device).is_cuda
        for mixed in (
            lambda: there + here,
            lambda: here[there[:, 0].long()],
            lambda: torch.cat([there, here]),
        ):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        there[0] = 5.0
        assert there.tolist()[0] == [5.0, 5.0] and there[torch.tensor([0])].is_cuda


def test_sensitivity_leaves_nothing_on_the_cpu(trace):
    assert same(pretending(lambda: heads(trace, "cuda")), heads(trace, "cpu"), 1e-6)


def test_analyze_leaves_nothing_on_the_cpu(trace):
    assert same(pretending(lambda: analysed(trace, "cuda")), analysed(trace, "cpu"), 1e-3)


def test_comparing_every_policy_leaves_nothing_on_the_cpu(trace):
    names = list(all_policies())
    document = pretending(lambda: compare(trace, names, SETTINGS, layers=[0, 2], device="cuda"))
    assert {row["name"] for row in document["policies"]} >= set(names) and not document["left_out"]
    want = quality(compare(trace, names, SETTINGS, layers=[0, 2]))
    assert {name for name, row in quality(document).items() if not same(row, want[name], 1e-3)} == set()


@pytest.mark.parametrize("run", [compare, sensitivity])
def test_a_device_that_does_not_exist_is_refused(trace, run):
    with pytest.raises(InputError, match="'cuda:99' is not available"):
        run(trace, ["fp8"] if run is sensitivity else ["quest"], device="cuda:99")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", sorted(all_policies()))
def test_a_gpu_compares_as_the_cpu_does(half_trace, name):
    if name in ("pqcache", "retrieval_attention"):
        pytest.importorskip("faiss")
    settings = {name: SETTINGS[name]} if name in SETTINGS else None
    # Given, not the wave index's own: its clusters differ between devices, and with them what it reads.
    target = compare(half_trace, ["streaming"])["target_read_bytes_per_step"]
    got, want = (
        quality(compare(half_trace, [name], settings, target_bytes=target, device=d)) for d in ("cuda", "cpu")
    )
    assert got.keys() == want.keys()
    for row in want:
        if row in ("wave_index", "clusterkv", "pqcache", "retrieval_attention"):
            # Clusters of so few keys settle elsewhere with every rounding; what they cost does not change.
            assert same(got[row]["read_bytes_per_step"], want[row]["read_bytes_per_step"], 0.02), row
        else:
            assert same(got[row], want[row], 0.02), row


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_ranks_heads_as_the_cpu_does(trace, half_trace):
    assert same(heads(trace, "cuda"), heads(trace, "cpu"), 1e-3)
    # Halves differ by a rounding where they are quantised: a step of a coarse precision here and there.
    there, here = heads(half_trace, "cuda"), heads(half_trace, "cpu")
    assert same(there["precisions"], here["precisions"], 0.05)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("policy", ["quest", "oracle_topk"])
def test_a_gpu_analyses_as_the_cpu_does(half_trace, policy):
    assert same(analysed(half_trace, "cuda", policy), analysed(half_trace, "cpu", policy), 0.01)
