"""One sample through the model and into the trace: its tree of segments, keys, values and queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtune.capturing.hook import DecodeQueries, QueryHook, Sink
from kvtune.capturing.loop import Session
from kvtune.models import cached
from kvtune.traces import SampleWriter, check_finite
from kvtune.workloads import Request, Sample, Turn, Workload

NO_REQUEST = -1
"""``request`` and ``turn`` of the context's segment, which all requests share."""


@dataclass(frozen=True)
class Choice:
    """What of a run is recorded, and how it answers.

    ``layers`` and ``kv_heads`` ascending; ``values`` false keeps keys only; ``prompt_queries`` last positions
    of the context and of each question keep their queries (``None``: all); at most ``decode`` answer tokens
    a turn; ``force`` feeds the references as answers; ``keep_answers`` continues a conversation after the
    model's own answers instead of the references.
    """

    layers: tuple[int, ...]
    kv_heads: tuple[int, ...]
    values: bool = True
    prompt_queries: int | None = 1024
    decode: int = 64
    force: bool = False
    keep_answers: bool = False

    def prompt_positions(self, tokens: int) -> int:
        """How many queries of a prompt segment of ``tokens`` tokens are kept."""
        return tokens if self.prompt_queries is None else min(tokens, self.prompt_queries)

    def feeds_back(self, request: Request, turn: int) -> bool:
        """Whether the reference replaces the answer of ``turn`` before the next question."""
        last = turn == len(request.turns) - 1
        return not (last or self.force or self.keep_answers) and bool(request.turns[turn].reference_ids)


class SampleRecorder:
    """Writes one sample while a session runs it. ``hook`` must be the model's attention function."""

    def __init__(
        self, session: Session, hook: QueryHook, writer: SampleWriter, choice: Choice, workload: Workload
    ) -> None:
        self._session = session
        self._hook = hook
        self._writer = writer
        self._choice = choice
        self._workload = workload
        self._heads = list(choice.kv_heads)

    def run(self, sample: Sample) -> None:
        """The whole sample: the context once, then each request from the end of the context."""
        context = self._prompt("context", sample.context_ids, -1, NO_REQUEST, NO_REQUEST)
        fork = self._session.mark()
        for number, request in enumerate(sample.requests):
            self._session.rewind(fork)
            self._request(sample.task, number, request, context)

    def _request(self, task: str, number: int, request: Request, parent: int) -> None:
        for t, turn in enumerate(request.turns):
            if turn.question_ids:
                parent = self._prompt("question", turn.question_ids, parent, number, t)
            asked, question = self._session.mark(), parent
            parent, ids = self._answer(turn, question, number, t)
            text = self._session.loaded.tokenizer.decode(ids, skip_special_tokens=True)
            self._writer.record(number, t, task, turn.reference, text, self._workload.score(turn, text))
            if self._choice.feeds_back(request, t):
                self._session.rewind(asked)
                start = self._session.length
                self._session.feed(turn.reference_ids)
                parent = self._segment("fed_back", turn.reference_ids, question, number, t, start)

    def _prompt(self, kind: str, ids: Sequence[int], parent: int, request: int, turn: int) -> int:
        """Prefill ``ids`` as a segment; the queries of its last positions go to the writer as they come."""
        start = self._session.length
        segment = self._writer.segment(
            kind=kind, request=request, turn=turn, parent=parent, start=start, token_ids=ids
        )
        kept = self._choice.prompt_positions(len(ids))
        with self._hook.to(self._prompt_sink(segment, turn), first=start + len(ids) - kept):
            self._session.feed(ids)
        self._keys_values(segment, start)
        return segment

    def _prompt_sink(self, segment: int, turn: int) -> Sink:
        def sink(layer: int, position: int, queries: Tensor) -> None:
            positions = torch.arange(position, position + len(queries))
            self._writer.queries(layer, segment, positions, torch.full_like(positions, -1), turn, queries)

        return sink

    def _answer(self, turn: Turn, parent: int, request: int, number: int) -> tuple[int, list[int]]:
        """The model's (or the forced) answer as a segment with one query a token."""
        start = self._session.length
        queries = DecodeQueries()
        with self._hook.to(queries):
            if self._choice.force:
                ids = list(turn.reference_ids[: self._choice.decode])
                self._session.feed(ids)
            else:
                ids = list(self._session.generate(self._choice.decode))
        segment = self._segment("generated", ids, parent, request, number, start)
        if ids:
            steps = torch.arange(len(ids))
            for layer in self._choice.layers:
                self._writer.queries(layer, segment, start + steps, steps, number, queries.take(layer))
        return segment, ids

    def _segment(
        self, kind: str, ids: Sequence[int], parent: int, request: int, turn: int, start: int
    ) -> int:
        segment = self._writer.segment(
            kind=kind, request=request, turn=turn, parent=parent, start=start, token_ids=ids
        )
        self._keys_values(segment, start)
        return segment

    def _keys_values(self, segment: int, start: int) -> None:
        """Move the keys and values at positions ≥ ``start`` from the cache to the writer, layer by layer."""
        if start == self._session.length:
            return
        for layer in self._choice.layers:
            keys, values = (self._part(held, start) for held in cached(self._session.cache, layer))
            positions = torch.arange(start, self._session.length)
            where: dict[str, Any] = {"sample": self._writer.index, "layer": layer, "heads": self._heads}
            check_finite(keys, positions=positions, **where)
            self._writer.keys_values(layer, segment, keys, values if self._choice.values else None)

    def _part(self, held: Tensor, start: int) -> Tensor:
        """Chosen heads of a cached tensor [H, N, d] from position ``start`` on, on the CPU."""
        part = held[:, start:]
        return (part if len(self._heads) == len(part) else part[self._heads]).cpu()
