"""The passes of a request through an engine: forced to the same tokens, or running free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.capturing.hook import Sink
from kvtune.runtime.comparison import AnswerComparison, Comparer
from kvtune.runtime.engine import Engine
from kvtune.workloads import Request, Turn


@dataclass(frozen=True)
class Answer:
    """One answer's tokens and what full attention said at each.

    ``tokens`` [A] were fed one by one; ``logits`` [A, V] follow each (float32). The first ``n_reference``
    are the reference's (0: there is none, all are the model's own greedy choice).
    """

    tokens: tuple[int, ...]
    logits: Tensor
    n_reference: int


Segment = Callable[[str, int, Sequence[int]], AbstractContextManager[None]]
"""Entered around the tokens of a ``question`` or ``generated`` segment of a turn."""


def unseen(kind: str, turn: int, ids: Sequence[int]) -> AbstractContextManager[None]:
    """A :data:`Segment` that nobody looks at."""
    return nullcontext()


def full_pass(engine: Engine, request: Request, steps: int, sink: Sink | None = None) -> list[Answer]:
    """All turns of ``request``; ``engine`` stands behind the first question, in full attention.

    Each answer has its reference's tokens and at least ``steps`` in all. ``sink`` is shown the queries of
    the decode steps.
    """
    answers = []
    for number, turn in enumerate(request.turns):
        if number:
            _ask(engine, turn)
        with _showing(engine, sink):
            answers.append(_answer(engine, turn, steps))
    return answers


def forced_pass(
    engine: Engine, request: Request, answers: list[Answer], segment: Segment = unseen
) -> Iterator[AnswerComparison]:
    """All turns under the plan, from behind the first question, forced to the tokens of ``answers``."""
    for number, (turn, answer) in enumerate(zip(request.turns, answers)):
        if number and turn.question_ids:
            with segment("question", number, turn.question_ids):
                _ask(engine, turn)
        comparer = Comparer(answer.tokens, answer.n_reference, engine.loaded.eos_ids)
        with segment("generated", number, answer.tokens):
            for token, full in zip(answer.tokens, answer.logits):
                comparer.step(full, engine.step(token))
        yield comparer.result(number)


def free_pass(
    engine: Engine,
    request: Request,
    limit: int,
    stretch: Callable[[], None],
    sink: Sink | None = None,
) -> list[tuple[int, ...]]:
    """Greedy answers of all turns, from behind the first question, of at most ``limit`` tokens each.

    An answer ends before an end token. Where a turn has a reference, that is what the next question follows
    (the answer is forgotten); from the first turn without one on, answers stay. ``stretch`` is called when
    decode steps are about to be forgotten and at the end: those since the last call lie on one timeline.
    ``sink`` is shown the queries of the decode steps.
    """
    answers, stays = [], False
    for number, turn in enumerate(request.turns):
        if number:
            _ask(engine, turn)
        last = number == len(request.turns) - 1
        stays = stays or not turn.reference_ids
        asked = None if stays or last else engine.mark()
        with _showing(engine, sink):
            answers.append(tuple(_greedy(engine, limit)))
        if asked is not None:
            stretch()
            engine.rewind(asked)
            engine.feed(turn.reference_ids)
    stretch()
    return answers


def _showing(engine: Engine, sink: Sink | None) -> AbstractContextManager[None]:
    return nullcontext() if sink is None else engine.showing(sink)


def _ask(engine: Engine, turn: Turn) -> None:
    if turn.question_ids:
        engine.feed(turn.question_ids)


def _answer(engine: Engine, turn: Turn, steps: int) -> Answer:
    """The tokens that every run of this turn is forced to: the reference, then the model's greedy choice.

    End-of-text tokens are passed over, so that a short reference is continued.
    """
    tokens = list(turn.reference_ids)
    logits = engine.logits.float()
    banned = torch.tensor(sorted(engine.loaded.eos_ids), dtype=torch.int64, device=logits.device)
    rows: list[Tensor] = []
    for at in range(max(steps, len(turn.reference_ids))):
        if at == len(tokens):
            tokens.append(int(logits.index_fill(0, banned, -torch.inf).argmax()))
        logits = engine.step(tokens[at])
        rows.append(logits)
    return Answer(tuple(tokens), torch.stack(rows), len(turn.reference_ids))


def _greedy(engine: Engine, limit: int) -> Iterator[int]:
    logits = engine.logits
    for _ in range(limit):
        token = int(logits.argmax())
        if token in engine.loaded.eos_ids:
            return
        logits = engine.step(token)
        yield token
