"""A real (tiny, random) model decoding through the contracts."""

from __future__ import annotations

import pytest
import torch
from runtime_model import GEOMETRY, tiny_model

from kvtune.caching import simulate
from kvtune.errors import InputError
from kvtune.models import feed, new_cache
from kvtune.policies import all_policies, get_policy
from kvtune.policies.plan import Plan
from kvtune.runtime.hook import attached
from kvtune.runtime.sequence import Sequence

PROMPT = 1300


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 97, (1, PROMPT + 12), generator=torch.Generator().manual_seed(1))


def decode_logits(model, tokens, prompt=PROMPT):
    """Logits of the forced tokens after the prompt, one step at a time."""
    cache = new_cache()
    for part in (tokens[0, : prompt // 2], tokens[0, prompt // 2 : prompt]):
        feed(model, part, cache)
    return torch.stack([feed(model, token[None], cache)[0] for token in tokens[0, prompt:]])


@pytest.mark.parametrize("name", sorted(n for n, c in all_policies().items() if not c.evicts))
def test_lossless_decoding_equals_the_model(model, tokens, name):
    parameters = all_policies()[name].lossless(tokens.shape[1])
    if parameters is None:
        pytest.skip("the method has no lossless setting")
    expected = decode_logits(model, tokens)
    with attached(model, Sequence(Plan(get_policy(name, parameters)), GEOMETRY)):
        got = decode_logits(model, tokens)
    assert torch.allclose(got, expected, atol=1e-3 * float(expected.std()))


def test_sparse_decoding_differs_and_the_model_is_restored(model, tokens):
    expected = decode_logits(model, tokens)
    before = model.config._attn_implementation
    with attached(model, Sequence(Plan(get_policy("streaming", {"recent": 20})), GEOMETRY)):
        assert not torch.allclose(decode_logits(model, tokens), expected, atol=1e-2)
    assert model.config._attn_implementation == before
    assert torch.equal(decode_logits(model, tokens), expected)


def test_replay_of_the_live_log_is_equal_access_by_access(model, tokens):
    sequence = Sequence(Plan(get_policy("wave_index", {"retrieval": 0.1})), GEOMETRY, cache_fraction=0.1)
    with attached(model, sequence):
        decode_logits(model, tokens)
    log = sequence.access_log()
    (replay,) = simulate(log, [0.1], "wave", keep_hits=True)
    assert len(log.units) == 6
    live = sequence.hit_masks()
    for unit, result in replay.units.items():
        first_pages = log.units[unit].pages.cumsum() - log.units[unit].pages
        assert result.page_hits[first_pages].tolist() == live[unit]
    assert 0 < replay.hit_ratio.request < 1


def test_dense_layers_stay_exact(model, tokens):
    expected = decode_logits(model, tokens)
    plan = Plan(get_policy("streaming", {"recent": 5}), dense_layers=(0, 1, 2))
    with attached(model, Sequence(plan, GEOMETRY)):
        assert torch.equal(decode_logits(model, tokens), expected)


def test_a_new_sequence_starts_afresh(model, tokens):
    """Without telling it, the runtime sees from the lengths that another sequence began."""
    sequence = Sequence(Plan(get_policy("wave_index", {"retrieval": 0.1})), GEOMETRY)
    other = torch.randint(0, 97, tokens.shape, generator=torch.Generator().manual_seed(2))
    with attached(model, sequence):
        first = decode_logits(model, tokens)
        decode_logits(model, other)
        assert torch.equal(decode_logits(model, tokens), first)


def test_generate_decodes_through_the_runtime(model, tokens):
    plan = Plan(get_policy("wave_index", all_policies()["wave_index"].lossless(2000)))
    prompt = tokens[:, :PROMPT]
    wanted = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    sequence = Sequence(plan, GEOMETRY)
    with attached(model, sequence):
        got = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(got, wanted)
    assert sequence.layers[0].index is not None and sequence.layers[0].length == PROMPT + 5


def test_batches_are_refused(model, tokens):
    with (
        attached(model, Sequence(Plan(get_policy("wave_index")), GEOMETRY)),
        pytest.raises(InputError, match="one sequence"),
    ):
        model(tokens[:, :20].repeat(2, 1))
