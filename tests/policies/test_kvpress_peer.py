"""SnapKV, PyramidKV and StreamingLLM keep what NVIDIA's kvpress keeps, given the same keys and queries.

kvpress needs transformers below 5.3, so it lives in an environment of its own; without it, these tests are
skipped. To make one (a CPU build of torch will do, if it is installed first):

    python -m venv kvpress-env
    kvpress-env/bin/pip install torch kvpress
    KVTUNE_KVPRESS_PYTHON=kvpress-env/bin/python pytest tests/policies/test_kvpress_peer.py

``kvpress_peer.py`` beside this file runs there, on a tiny random model (last run with kvpress 0.5.5). Known
differences, kept out of the comparison: kvpress counts PyramidKV's window inside a layer's tokens, and rounds
where the paper's code floors (the numbers here divide evenly).
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtune.geometry import LayerInfo
from kvtune.policies import get_policy

PYTHON = os.environ.get("KVTUNE_KVPRESS_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="KVTUNE_KVPRESS_PYTHON names no environment with kvpress")

LAYERS, TOKENS, WINDOW, BETA = 4, 240, 16, 2
INFO = LayerInfo(
    layer=0,
    n_layers=LAYERS,
    n_heads=6,
    n_kv_heads=2,
    head_dim=16,
    value_dim=16,
    scaling=16**-0.5,
    item_bytes=4,
)


@pytest.fixture(scope="module")
def peer(tmp_path_factory) -> dict[str, torch.Tensor]:
    assert PYTHON is not None
    out = tmp_path_factory.mktemp("kvpress") / "kept.npz"
    script = Path(__file__).with_name("kvpress_peer.py")
    done = subprocess.run([PYTHON, str(script), str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(out, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def kept(policy, peer, number):
    """Positions [H, K] that ``policy`` attends at the prompt's last token, sorted."""
    keys = peer[f"keys_{number}"]
    prompt = peer[f"queries_{number}"].unflatten(0, (2, 3))
    index = policy.build(keys, torch.zeros_like(keys), prompt, dataclasses.replace(INFO, layer=number))
    last = torch.tensor([TOKENS - 1])
    return policy.select(index, prompt[:, :, -1][None], last).positions[0].sort(-1).values


@pytest.mark.parametrize("number", range(LAYERS))
@pytest.mark.parametrize(("name", "kernel"), [("snapkv", 5), ("snapkv_kernel_1", 1)])
def test_snapkv_keeps_the_same_tokens(peer, number, name, kernel):
    theirs = peer[f"{name}_{number}"]
    policy = get_policy("snapkv", {"capacity": theirs.shape[1], "window": WINDOW, "kernel": kernel})
    assert torch.equal(kept(policy, peer, number), theirs)


@pytest.mark.parametrize("number", range(LAYERS))
def test_pyramidkv_gives_a_layer_the_same_tokens_and_ranks_them_alike(peer, number):
    """kvpress's average of 60 tokens is our room before the window: capacity 60 + window."""
    policy = get_policy("pyramidkv", {"capacity": 60 + WINDOW, "window": WINDOW, "beta": BETA})
    budget = int(peer[f"pyramidkv_tokens_{number}"])
    assert policy.past_tokens(TOKENS, dataclasses.replace(INFO, layer=number)) == budget
    theirs = peer[f"pyramidkv_{number}"]
    assert theirs.shape[1] == budget
    ours = kept(get_policy("snapkv", {"capacity": budget, "window": WINDOW}), peer, number)
    assert torch.equal(ours, theirs)
    more = kept(policy, peer, number)
    for head in range(2):
        assert set(theirs[head].tolist()) < set(more[head].tolist())


@pytest.mark.parametrize("number", range(LAYERS))
def test_streaming_keeps_the_same_tokens(peer, number):
    theirs = peer[f"streaming_{number}"]
    policy = get_policy("streaming", {"sink": 4, "recent": theirs.shape[1] - 4})
    assert torch.equal(kept(policy, peer, number), theirs)


def test_the_layers_differ(peer):
    """The comparison would be empty if every layer or head kept the same tokens."""
    rows = [row.tolist() for number in range(LAYERS) for row in peer[f"snapkv_{number}"]]
    assert len({tuple(row) for row in rows}) == len(rows)
