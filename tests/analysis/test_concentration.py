from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.analysis.concentration import entropy, token_probabilities, tokens_for_mass, zone_mass


def random_probabilities(rows, length, seed, temperature=3.0):
    generator = torch.Generator().manual_seed(seed)
    scores = temperature * torch.randn(rows, length, generator=generator)
    scores[:, length // 2] = -math.inf
    return scores, token_probabilities(scores)


def test_probabilities_are_the_softmax_of_eligible_tokens():
    scores, probabilities = random_probabilities(4, 9, 0)
    torch.testing.assert_close(
        probabilities.double(), torch.softmax(scores.double(), -1), rtol=1e-5, atol=1e-7
    )
    assert bool((probabilities[:, 4] == 0).all())


def test_entropy_equals_its_definition_and_its_bounds():
    _, probabilities = random_probabilities(6, 17, 1)
    for row, got in zip(probabilities, entropy(probabilities)):
        expected = -sum(p * math.log(p) for p in row.double().tolist() if p > 0)
        assert float(got) == pytest.approx(expected, abs=1e-5)
    assert float(entropy(torch.full((8,), 1 / 8))) == pytest.approx(math.log(8), abs=1e-6)
    assert float(entropy(torch.tensor([1.0, 0.0, 0.0]))) == 0.0


def slow_tokens_for_mass(row, share):
    gathered, total = 0.0, sum(row)
    for count, p in enumerate(sorted(row, reverse=True), start=1):
        gathered += p
        if gathered >= share * total:
            return count
    raise AssertionError("the whole mass is never reached")


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 40), st.integers(0, 99), st.floats(0.1, 8.0))
def test_tokens_for_mass_equals_adding_the_best_tokens_one_by_one(length, seed, temperature):
    _, probabilities = random_probabilities(3, length, seed, temperature)
    got = tokens_for_mass(probabilities, (0.5, 0.9, 0.99))
    for row, counts in zip(probabilities.double().tolist(), got.tolist()):
        assert counts == [slow_tokens_for_mass(row, share) for share in (0.5, 0.9, 0.99)]
        assert counts == sorted(counts)
        assert counts[0] >= 1 and counts[-1] <= length


def test_zone_mass_adds_the_right_tokens():
    length, prompt = 100, 90
    positions = torch.tensor([92, 99])
    scores = torch.randn(2, 3, length, generator=torch.Generator().manual_seed(2))
    scores[0, :, 93:] = -math.inf
    probabilities = token_probabilities(scores)
    sink, local, late = zone_mass(probabilities, positions, prompt)
    for step, position in enumerate(positions.tolist()):
        for head in range(3):
            row = probabilities[step, head].double()
            assert float(sink[step, head]) == pytest.approx(float(row[:4].sum()), abs=1e-6)
            assert float(local[step, head]) == pytest.approx(float(row[position - 63 :].sum()), abs=1e-6)
            assert float(late[step, head]) == pytest.approx(float(row[prompt:].sum()), abs=1e-6)
