"""The sliding window against plain ranges."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_inputs import HEADS, LAYER, queries

from kvtune.errors import InputError
from kvtune.policies import get_policy


@given(first=st.integers(0, 80), window=st.integers(1, 100), own=st.none() | st.integers(1, 100))
def test_attends_the_last_tokens_of_the_shorter_window(first, window, own):
    layer = dataclasses.replace(LAYER, window=own)
    positions = torch.arange(first, first + 5)
    selection = get_policy("sliding_window", {"window": window}).select(layer, queries(5), positions)
    for step, position in enumerate(positions.tolist()):
        wanted = [p for p in range(position + 1) if position - p < min(window, own or window)]
        for head in range(HEADS):
            assert sorted(p for p in selection.positions[step, head].tolist() if p >= 0) == wanted
    assert selection.scan_bytes.sum() == 0 and selection.blocks is None


def test_empty_window_is_refused():
    with pytest.raises(InputError, match="window"):
        get_policy("sliding_window", {"window": 0})
