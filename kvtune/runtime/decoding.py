"""Running a model over a request: dense prefill, then answer tokens one step at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from kvtune.models import LoadedModel, feed
from kvtune.runtime.sequence import Sequence as LiveSequence
from kvtune.workloads import Request, Turn

PREFILL_CHUNK = 2048


@dataclass(frozen=True)
class Answer:
    """One answer's tokens and what the model said at each.

    ``tokens`` [A] were fed one by one; ``logits`` [A, V] (float32) follow each. The first ``n_reference`` are
    the reference's (0: there is none, all are the model's own greedy choice).
    """

    tokens: tuple[int, ...]
    logits: Tensor
    n_reference: int
    seconds: float


def prefill(loaded: LoadedModel, cache: DynamicCache, ids: Sequence[int]) -> Tensor | None:
    """Append ``ids`` to ``cache`` in chunks; logits [V] after the last, float32 (``None`` for no tokens)."""
    logits = None
    for start in range(0, len(ids), PREFILL_CHUNK):
        chunk = torch.tensor(ids[start : start + PREFILL_CHUNK], device=loaded.device)
        logits = feed(loaded.model, chunk, cache)[-1].float()
    return logits


def step(loaded: LoadedModel, cache: DynamicCache, token: int) -> Tensor:
    """One decode step: logits [V] after ``token``, float32."""
    return feed(loaded.model, torch.tensor([token], device=loaded.device), cache)[-1].float()


def answer_with_full_attention(
    loaded: LoadedModel, cache: DynamicCache, turn: Turn, steps: int, logits: Tensor | None
) -> Answer:
    """The tokens that every run of this turn is forced to: the reference, then the model's greedy choice.

    The answer has the reference's tokens and at least ``steps`` in all; end-of-text tokens are passed over,
    so that a short reference is continued.
    """
    tokens: list[int] = list(turn.reference_ids)
    n_reference = len(tokens)
    total = max(steps, n_reference)
    banned = list(loaded.eos_ids)
    rows: list[Tensor] = []
    started = time.perf_counter()
    while len(rows) < total:
        if len(rows) == len(tokens):
            last = rows[-1] if rows else logits
            assert last is not None
            allowed = last.clone()
            allowed[banned] = -torch.inf
            tokens.append(int(allowed.argmax()))
        rows.append(step(loaded, cache, tokens[len(rows)]))
    return Answer(tuple(tokens), torch.stack(rows), n_reference, time.perf_counter() - started)


def answer_forced(loaded: LoadedModel, cache: DynamicCache, answer: Answer) -> Answer:
    """The same tokens again, whatever attention the model now has."""
    started = time.perf_counter()
    rows = [step(loaded, cache, token) for token in answer.tokens]
    return Answer(answer.tokens, torch.stack(rows), answer.n_reference, time.perf_counter() - started)


def full_pass(loaded: LoadedModel, cache: DynamicCache, request: Request, steps: int) -> list[Answer]:
    """All turns of ``request`` with full attention; ``cache`` holds the context."""
    answers = []
    logits = None
    for turn in request.turns:
        question = prefill(loaded, cache, turn.question_ids)
        logits = logits if question is None else question
        answers.append(answer_with_full_attention(loaded, cache, turn, steps, logits))
        logits = answers[-1].logits[-1]
    return answers


def forced_pass(
    loaded: LoadedModel, cache: DynamicCache, request: Request, answers: list[Answer], sequence: LiveSequence
) -> list[Answer]:
    """All turns again through ``sequence``, every answer forced to the tokens of ``answers``."""
    forced = []
    for turn, answer in zip(request.turns, answers):
        with prefilling(sequence):
            prefill(loaded, cache, turn.question_ids)
        forced.append(answer_forced(loaded, cache, answer))
    return forced


@contextmanager
def prefilling(sequence: LiveSequence) -> Iterator[None]:
    """Even a single token is prefill inside this block."""
    sequence.prefilling = True
    try:
        yield
    finally:
        sequence.prefilling = False
