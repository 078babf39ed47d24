"""What a workload hands to capture: samples of a shared context, requests over it and their turns."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtune.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = Any


@dataclass(frozen=True)
class Turn:
    """One question and its reference answer.

    ``question_ids`` are the tokens fed between what came before and the answer: for the first turn the rest
    of the user message and the generation prompt; for later turns they begin by closing the previous answer.
    They are empty for a raw prompt, whose whole text is the context.
    ``reference_ids`` hold the answer's text alone (no end-of-turn token: the next turn's ``question_ids``
    add it); they are empty when there is no reference.
    """

    question: str
    question_ids: tuple[int, ...]
    reference: str | None = None
    reference_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """One conversation over the sample's context; its turns follow each other on one timeline."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Sample:
    """A context, encoded once (a leading BOS included where the tokenizer uses one), and its requests.

    A request's timeline is ``context_ids``, then for each turn ``question_ids`` and the answer's tokens.
    """

    task: str
    context_ids: tuple[int, ...]
    requests: tuple[Request, ...]


class Workload(ABC):
    """A task: makes samples for a tokenizer, and scores answers.

    Samples depend on the arguments and the tokenizer only: sample ``i`` is the same whatever ``n`` is.
    """

    name: str
    title: str
    default_context: int = 4096  # tokens
    default_turns: int = 1

    @abstractmethod
    def samples(
        self, tokenizer: Tokenizer, context_tokens: int | None, n: int, turns: int, requests: int, seed: int
    ) -> Iterator[Sample]:
        """Yield ``n`` samples of ``requests`` requests with ``turns`` turns each.

        ``context_tokens`` bounds ``len(sample.context_ids)``: never above, and a few tokens below at most.
        ``None`` means ``default_context``. Raises ``InputError`` where the task cannot fit into it.
        """

    def checked(self, context_tokens: int | None, n: int, turns: int, requests: int) -> int:
        """The context's budget in tokens, all counts checked. Raises ``InputError`` on a count below 1."""
        for option, count in (
            ("--context", context_tokens),
            ("--samples", n),
            ("--turns", turns),
            ("--requests", requests),
        ):
            if count is not None and count < 1:
                raise InputError(f"{option} must be at least 1, not {count}")
        return context_tokens or self.default_context

    def score(self, turn: Turn, generated_text: str) -> float | None:
        """The answer's score in [0, 1]; ``None`` where the turn has no reference.

        Here RULER's measure: 1.0 if the reference stands in the generated text (case ignored), else 0.0.
        """
        if turn.reference is None:
            return None
        return float(turn.reference.strip().lower() in generated_text.lower())


def sample_rng(task: str, seed: int, sample: int) -> random.Random:
    """The random source of one sample: independent of other samples and of Python's hash randomisation."""
    return random.Random(f"{task}/{seed}/{sample}")
