"""Whether a run fits a GPU, asked before the weights are read."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_model import CONFIG, GEOMETRY, tiny_model

from kvtune.errors import InputError
from kvtune.models.adapters import count_parameters
from kvtune.models.loading import ModelFiles, Source
from kvtune.models.rope import Rope
from kvtune.runtime import room
from kvtune.runtime.room import WORKING_BYTES, check_fit, check_layers, check_room, free_host_bytes

TOKEN = 3 * 2 * 16 * 4 + 6 * 16 * 4


@given(tokens=st.integers(1, 10**6), weights=st.integers(0, 10**9), spare=st.integers(-(10**9), 10**9))
def test_it_fits_where_the_bytes_add_up(tokens, weights, spare):
    free = weights + WORKING_BYTES + tokens * TOKEN + spare
    if spare >= 0:
        check_fit(GEOMETRY, weights, tokens, free)
        return
    with pytest.raises(InputError) as refused:
        check_fit(GEOMETRY, weights, tokens, free)
    fits = re.search(r"about ([\d,]+) tokens", refused.value.hint or "")
    if fits:
        check_fit(GEOMETRY, weights, int(fits[1].replace(",", "")), free)


def test_the_message_says_what_is_needed_and_what_would_fit():
    with pytest.raises(InputError) as refused:
        check_fit(GEOMETRY, 2 << 30, 10**7, 4 << 30)
    fits = ((4 << 30) - (2 << 30) - WORKING_BYTES) // TOKEN
    assert "10,000,000 tokens need about" in refused.value.message and "2.0 GiB of weights" in str(
        refused.value
    )
    assert refused.value.hint == f"about {fits:,} tokens would fit: lower --context"
    with pytest.raises(InputError) as refused:
        check_fit(GEOMETRY, 4 << 30, 100, 4 << 30)
    assert refused.value.hint == "use --device cpu"


def test_weights_are_counted_without_reading_them():
    assert count_parameters(CONFIG) == sum(p.numel() for p in tiny_model().parameters())


def test_only_a_gpu_is_asked(monkeypatch):
    files = ModelFiles(Source("tiny", "nowhere"), None, CONFIG)
    check_room(files, Rope(), "auto", torch.device("cpu"), 10**9)
    monkeypatch.setattr(room, "free_bytes", lambda device: 1 << 30)
    check_room(files, Rope(), "auto", torch.device("cuda"), 1000)
    with pytest.raises(InputError, match="on the GPU"):
        check_room(files, Rope(), "auto", torch.device("cuda"), 10**9)


def test_layers_without_room_are_refused_with_what_to_do():
    check_layers(4, 1000, 512, device=None, host=None)
    check_layers(4, 1000, 512, device=4 * 1000 * 512 * 9 // 8, host=None)
    with pytest.raises(InputError, match="on the GPU beside the model's") as refused:
        check_layers(4, 1000, 512, device=4 * 1000 * 512, host=None)
    assert "--offload cpu" in str(refused.value.hint)
    check_layers(4, 1000, 512, device=2 * 1000 * 512, host=4 * 1000 * 512)
    with pytest.raises(InputError, match="pinned host memory") as refused:
        check_layers(4, 1000, 512, device=None, host=4 * 1000 * 512 - 1)
    assert "--offload none" in str(refused.value.hint)


def test_free_host_memory_is_what_the_system_says():
    found = free_host_bytes()
    assert found is None or 0 < found < 1 << 50
