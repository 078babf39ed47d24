"""Running a request twice over the same context: with full attention, then forced to the same tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.capturing.loop import Session
from kvtune.runtime.sequence import Sequence
from kvtune.workloads import Request, Turn


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


def full_pass(session: Session, request: Request, steps: int) -> list[Answer]:
    """All turns of ``request`` with the attention the model has; ``session`` holds the context."""
    answers = []
    for turn in request.turns:
        session.feed(turn.question_ids)
        answers.append(_answer(session, turn, steps))
    return answers


def forced_pass(
    session: Session, request: Request, answers: list[Answer], sequence: Sequence
) -> list[Answer]:
    """All turns again through ``sequence``, every answer forced to the tokens of ``answers``."""
    forced = []
    for turn, answer in zip(request.turns, answers):
        with prefilling(sequence):
            session.feed(turn.question_ids)
        started = time.perf_counter()
        logits = torch.stack([_step(session, token) for token in answer.tokens])
        forced.append(Answer(answer.tokens, logits, answer.n_reference, time.perf_counter() - started))
    return forced


@contextmanager
def prefilling(sequence: Sequence) -> Iterator[None]:
    """Even a single token is prefill inside this block."""
    sequence.prefilling = True
    try:
        yield
    finally:
        sequence.prefilling = False


def _answer(session: Session, turn: Turn, steps: int) -> Answer:
    """The tokens that every run of this turn is forced to: the reference, then the model's greedy choice.

    The answer has the reference's tokens and at least ``steps`` in all; end-of-text tokens are passed over,
    so that a short reference is continued.
    """
    tokens = list(turn.reference_ids)
    banned = torch.tensor(sorted(session.loaded.eos_ids), dtype=torch.int64, device=session.logits.device)
    rows: list[Tensor] = []
    started = time.perf_counter()
    for at in range(max(steps, len(turn.reference_ids))):
        if at == len(tokens):
            tokens.append(int(session.logits.index_fill(0, banned, -torch.inf).argmax()))
        rows.append(_step(session, tokens[at]))
    seconds = time.perf_counter() - started
    return Answer(tuple(tokens), torch.stack(rows), len(turn.reference_ids), seconds)


def _step(session: Session, token: int) -> Tensor:
    """Logits [V] after ``token``, float32."""
    session.feed([token])
    return session.logits.float()
