"""Needles: where they lie, that they can be told apart, and what making a haystack costs."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.errors import InputError
from kvtune.workloads import filler, get_workload
from kvtune.workloads.conversation import Conversation
from kvtune.workloads.haystack import hide, make_needles, spread_depths

_NEEDLE = re.compile(r"One of the special magic numbers for ([a-z]+-[a-z]+) is: (\d{5})\.")


def test_filler_is_varied_and_without_digits() -> None:
    lines = list(islice(filler.sentences(random.Random(0)), 1000))
    assert len(set(lines)) > 990
    assert not re.search(r"\d", "".join(lines))
    assert all(line[0].isupper() and line.endswith(".") for line in lines)


@given(st.integers(0, 2**32), st.integers(1, 300))
def test_keys_and_numbers_are_distinct(seed: int, n: int) -> None:
    needles = make_needles(random.Random(seed), n)
    assert len({needle.key for needle in needles}) == n
    assert len({needle.number for needle in needles}) == n


def test_more_needles_than_names_are_refused() -> None:
    assert len(set(filler.keys(random.Random(0), filler.KEY_COUNT))) == filler.KEY_COUNT
    with pytest.raises(InputError, match="too many"):
        make_needles(random.Random(0), filler.KEY_COUNT + 1)


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 10_000), st.integers(1, 40))
def test_each_needle_has_its_own_stretch_of_the_text(offset: float, sample: int, n: int) -> None:
    depths = spread_depths(offset, sample, n)
    assert [int(depth * n * (1 + 1e-12)) for depth in depths] == list(range(n))


def test_depths_of_a_single_needle_cover_the_text() -> None:
    depths = sorted(spread_depths(0.3, sample, 1)[0] for sample in range(20))
    gaps = [b - a for a, b in zip([0.0, *depths], [*depths, 1.0])]
    assert max(gaps) < 0.12


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 100))
def test_needles_lie_at_their_depth_between_sentences(depth: float, seed: int) -> None:
    rng = random.Random(seed)
    needles = make_needles(rng, 1)
    text = hide(Conversation(_Words(), 1), needles, [depth], 500, rng)  # type: ignore[arg-type]
    hay = text.split("\n\n", 1)[1]
    found = _NEEDLE.search(hay)
    assert found is not None
    before = hay[: found.start()].split()
    assert not before or before[-1].endswith(".")
    total = len(hay.split()) - len(found.group().split())
    assert abs(len(before) - depth * total) <= 25  # a sentence


class _Words:
    """One token a word: fast, and easy to count."""

    chat_template = bos_token_id = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [0] * len(text.split())}


@pytest.mark.parametrize("task", ["niah_single", "niah_multiquery"])
def test_each_question_asks_for_a_needle_in_the_text(tokenizer: Any, task: str) -> None:
    (sample,) = get_workload(task).samples(tokenizer, 3000, 1, 4, 3, seed=1)
    hidden = dict(_NEEDLE.findall(tokenizer.decode(sample.context_ids)))
    asked = [turn for request in sample.requests for turn in request.turns]
    assert len(hidden) == (12 if task == "niah_single" else 5)
    for turn in asked:
        key = re.search(r"number for (\S+) mentioned", turn.question)
        assert key is not None
        assert hidden[key.group(1)] == turn.reference
    if task == "niah_single":
        assert len({turn.reference for turn in asked}) == 12


def test_multiquery_hides_a_needle_for_each_of_many_turns(tokenizer: Any) -> None:
    (sample,) = get_workload("niah_multiquery").samples(tokenizer, 3000, 1, 8, 1, seed=1)
    assert len(_NEEDLE.findall(tokenizer.decode(sample.context_ids))) == 8
    assert len({turn.reference for turn in sample.requests[0].turns}) == 8


@pytest.mark.parametrize("task", ["niah_single", "niah_multiquery", "code_search"])
def test_a_long_context_is_tokenised_a_handful_of_times(counting: Any, task: str) -> None:
    (sample,) = get_workload(task).samples(counting, 40_000, 1, 1, 1, seed=0)
    characters = len(counting.inner.decode(sample.context_ids))
    whole = [length for length in counting.lengths if length > characters / 100]
    assert len(whole) <= 12
    assert sum(counting.lengths) <= 14 * characters


@pytest.mark.parametrize("task", ["niah_single", "niah_multiquery"])
def test_the_hint_names_a_length_that_fits(tokenizer: Any, task: str) -> None:
    make: Callable[[int], Any] = lambda context: list(  # noqa: E731
        get_workload(task).samples(tokenizer, context, 1, 1, 1, seed=3)
    )
    with pytest.raises(InputError) as caught:
        make(40)
    named = re.search(r"about (\d+) tokens", caught.value.hint or "")
    assert named is not None
    assert make(int(named.group(1)))
