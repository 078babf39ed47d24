"""Decoding token by token is the model's own greedy generation, and a session can go back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import CONFIGS, EOS, tiny_loaded, tokens

from kvtune.capturing import loop
from kvtune.capturing.loop import Session
from kvtune.models import cached
from kvtune.models.loading import LoadedModel


@pytest.fixture(params=list(CONFIGS))
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny_loaded(request.param)


def generated(loaded: LoadedModel, ids: tuple[int, ...], limit: int) -> list[int]:
    """The model's own greedy tokens, without the end token."""
    prompt = torch.tensor([ids])
    found = loaded.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=limit
    )[0, len(ids) :].tolist()
    return found[: found.index(EOS)] if EOS in found else found


@pytest.mark.parametrize("chunk", [7, 1024])
def test_answers_are_those_of_generate(loaded: LoadedModel, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "chunk_length", lambda total: chunk)
    for seed in range(3):
        ids = tokens(50, seed)
        session = Session(loaded)
        session.feed(ids)
        assert list(session.generate(24)) == generated(loaded, ids, 24)


def test_every_answer_token_is_fed_and_the_end_token_is_not():
    loaded = tiny_loaded()
    ids = tokens(30)
    session = Session(loaded)
    session.feed(ids)
    free = list(session.generate(12))
    assert session.length == 42, "the last token too went through the model"
    fifth = free[4]
    loaded.model.generation_config.eos_token_id = [fifth, EOS]
    session = Session(loaded)
    session.feed(ids)
    stopped = list(session.generate(12))
    assert stopped == free[: free.index(fifth)]
    assert session.length == 30 + len(stopped)


def test_going_back_forgets_a_branch(loaded: LoadedModel):
    session = Session(loaded)
    session.feed(tokens(30))
    fork = session.mark()
    session.feed(tokens(9, seed=1))
    first = list(session.generate(8))
    session.rewind(fork)
    session.feed(tokens(5, seed=2))
    list(session.generate(3))
    session.rewind(fork)
    session.feed(tokens(9, seed=1))
    assert list(session.generate(8)) == first
    straight = Session(loaded)
    straight.feed(tokens(30))
    straight.feed(tokens(9, seed=1))
    list(straight.generate(8))
    for layer in range(loaded.geometry.n_layers):
        for ours, theirs in zip(cached(session.cache, layer), cached(straight.cache, layer)):
            assert torch.equal(ours, theirs)


def test_windowed_layers_keep_their_early_keys():
    loaded = tiny_loaded("mistral")
    session = Session(loaded)
    session.feed(tokens(60))
    assert cached(session.cache, 0)[0].shape[1] == 60


def test_end_tokens_come_from_the_model_or_the_tokenizer():
    loaded = tiny_loaded()
    assert loaded.eos_ids == {EOS}
    loaded.model.generation_config.eos_token_id = None
    assert loaded.eos_ids == {EOS}, "the tokenizer's"
    assert replace(loaded, tokenizer=None).eos_ids == frozenset()
