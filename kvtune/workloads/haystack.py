"""Needles in a haystack: sentences that hold a number, spread over filler of an exact length in tokens.

The wording is RULER's (arXiv 2404.06654), whose keys and numbers it also follows.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from kvtune.errors import InputError
from kvtune.workloads import filler
from kvtune.workloads.conversation import Conversation
from kvtune.workloads.fitting import largest_fitting

_INTRODUCTION = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about the numbers afterwards.\n\n"
)
_LEAST_WORDS = 32  # of filler, below which there is no hay to speak of
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Needle:
    key: str
    number: str

    @property
    def sentence(self) -> str:
        return f"One of the special magic numbers for {self.key} is: {self.number}."

    @property
    def question(self) -> str:
        return (
            f"What is the special magic number for {self.key} mentioned in the provided text? "
            "Answer with the number only."
        )


def make_needles(rng: random.Random, n: int) -> list[Needle]:
    """``n`` needles whose keys and five-digit numbers all differ. Raises ``InputError`` if names run out."""
    if n > filler.KEY_COUNT:
        raise InputError(
            f"{n} needles in one context are too many: there are {filler.KEY_COUNT} names for them",
            "ask for fewer turns or requests",
        )
    numbers = rng.sample(range(10_000, 100_000), n)
    return [Needle(key, str(number)) for key, number in zip(filler.keys(rng, n), numbers)]


def needle_offset(task: str, seed: int) -> float:
    """Where in [0, 1) the depths of a task's samples begin under a seed."""
    return random.Random(f"{task}/{seed}/depth").random()


def spread_depths(offset: float, sample: int, n: int) -> list[float]:
    """Depths in [0, 1) of ``n`` needles: one in each n-th of the text, moving from sample to sample.

    Golden-ratio steps from ``offset`` fill the interval evenly over the samples, however many there are.
    """
    shift = offset + sample * _GOLDEN
    return [(j + (shift + j * _GOLDEN) % 1.0) / n for j in range(n)]


def hide(
    conversation: Conversation,
    needles: list[Needle],
    depths: list[float],
    context_tokens: int,
    rng: random.Random,
) -> str:
    """A text with ``needles[j]`` at ``depths[j]`` (share of the filler), of ``context_tokens`` at most.

    The text ends within a few tokens of the budget (its last filler sentence may be cut short). Raises
    ``InputError`` if the needles and a little filler cannot fit.
    """
    words: list[str] = []
    ends = [0]  # numbers of words after which a needle can stand: before, between and after sentences
    for sentence in filler.sentences(rng):
        words += sentence.split()
        ends.append(len(words))
        if len(words) >= max(context_tokens, _LEAST_WORDS):  # a word is a token or more
            break

    def text(n_words: int) -> str:
        return _INTRODUCTION + _insert(words[:n_words], ends, needles, depths)

    def count(more: int) -> int:
        return len(conversation.context_ids(text(_LEAST_WORDS + more)))

    more = largest_fitting(count, context_tokens, len(words) - _LEAST_WORDS)
    if more is None:
        raise InputError(
            f"a haystack with {len(needles)} needle{'s' if len(needles) > 1 else ''} cannot fit into "
            f"{context_tokens} tokens",
            f"the least for this tokenizer is about {count(0)} tokens: raise --context",
        )
    return text(_LEAST_WORDS + more)


def _insert(words: list[str], ends: list[int], needles: list[Needle], depths: list[float]) -> str:
    """The words with each needle's sentence at the sentence boundary nearest to its depth."""
    places = ends[: bisect_right(ends, len(words))]
    parts: list[str] = []
    done = 0
    for depth, needle in sorted(zip(depths, needles), key=lambda pair: pair[0]):
        place = _nearest(places, depth * len(words))
        parts += [*words[done:place], needle.sentence]
        done = place
    return " ".join(parts + words[done:])


def _nearest(sorted_values: list[int], value: float) -> int:
    i = bisect_left(sorted_values, value)
    return min(sorted_values[max(i - 1, 0) : i + 1], key=lambda candidate: abs(candidate - value))
