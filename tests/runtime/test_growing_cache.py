"""A cache that grows in place holds what one that copies itself holds."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CONFIGS, tiny_loaded, tokens

from kvtune.capturing.loop import Session
from kvtune.models import cached


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize("room", [1, 40, 500])
def test_feeding_and_going_back(family, room):
    """Prefill, steps, two branches from a mark: keys, values and logits are equal to the bit."""
    loaded = tiny_loaded(family)
    plain, growing = Session(loaded), Session(loaded, room=room)
    for session in (plain, growing):
        session.feed(tokens(30))
        session.fork = session.mark()
        for token in tokens(20, 1):
            session.feed([token])
        session.rewind(session.fork)
        session.feed(tokens(5, 2))
        session.feed([7])
    assert torch.equal(plain.logits, growing.logits)
    for layer in range(loaded.geometry.n_layers):
        for one, other in zip(cached(plain.cache, layer), cached(growing.cache, layer)):
            assert one.shape[1] == 36 and torch.equal(one, other)


def test_it_grows_in_place():
    session = Session(tiny_loaded(), room=64)
    session.feed(tokens(30))
    first = cached(session.cache, 0)[0]
    session.feed([5])
    second = cached(session.cache, 0)[0]
    assert first.data_ptr() == second.data_ptr() and (first.shape[1], second.shape[1]) == (30, 31)
