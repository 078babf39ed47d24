"""What a capture will write, known before the model runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtune.capturing.recording import Choice
from kvtune.errors import InputError
from kvtune.geometry import ModelGeometry
from kvtune.workloads import Request, Sample

_ROW_BYTES = 0.2
"""Id columns of one vector as Parquet stores them (runs and dictionaries), measured."""
_FILE_BYTES = 4096
"""A vector file's schema and footer, measured."""


@dataclass(frozen=True)
class CapturePlan:
    """The size of a capture, every answer taken to be as long as it may get.

    ``tokens`` go through the model, ``decode_steps`` of them as answers; ``longest`` is the longest timeline
    in tokens; ``sample_tokens`` and ``sample_bytes`` are the tokens and the expected bytes of each sample.
    """

    samples: int
    requests: int
    units: int
    tokens: int
    decode_steps: int
    longest: int
    sample_tokens: tuple[int, ...]
    sample_bytes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Expected bytes of the whole trace."""
        return sum(self.sample_bytes)


def plan_capture(samples: Sequence[Sample], geometry: ModelGeometry, choice: Choice) -> CapturePlan:
    """Add up what ``samples`` will take. Nothing is run."""
    counts = [_count(sample, choice) for sample in samples]
    requests = sum(len(sample.requests) for sample in samples)
    return CapturePlan(
        samples=len(samples),
        requests=requests,
        units=requests * len(choice.layers) * len(choice.kv_heads),
        tokens=sum(count.tokens for count in counts),
        decode_steps=sum(count.decode for count in counts),
        longest=max((count.longest for count in counts), default=0),
        sample_tokens=tuple(count.tokens for count in counts),
        sample_bytes=tuple(_bytes(count, geometry, choice) for count in counts),
    )


def check_fit(plan: CapturePlan, samples: Sequence[Sample], choice: Choice, max_positions: int) -> None:
    """Refuse what cannot be captured: a timeline longer than the model's positions, nothing to force."""
    if plan.longest > max_positions:
        raise InputError(
            f"the longest timeline has {plan.longest:,} tokens (context, questions and answers), "
            f"but the model reaches {max_positions:,}",
            "shorten it with --context or --decode, or extend the model with --rope yarn:4",
        )
    if choice.force:
        turns = (turn for sample in samples for request in sample.requests for turn in request.turns)
        if not all(turn.reference_ids for turn in turns):
            raise InputError("--force needs a reference answer for every turn, and one has none")


def samples_digest(samples: Sequence[Sample]) -> str:
    """Hex digest (16 digits) of every token of ``samples``: tells whether two captures read the same."""
    digest = hashlib.sha256()
    for sample in samples:
        for ids in _pieces(sample):
            digest.update(len(ids).to_bytes(8, "little") + np.asarray(ids, "<i8").tobytes())
    return digest.hexdigest()[:16]


@dataclass
class _Count:
    tokens: int = 0
    decode: int = 0
    queries: int = 0
    longest: int = 0

    def add(self, tokens: int, queries: int) -> None:
        self.tokens += tokens
        self.queries += queries


def _count(sample: Sample, choice: Choice) -> _Count:
    count = _Count()
    context = len(sample.context_ids)
    count.add(context, choice.prompt_positions(context))
    for request in sample.requests:
        _count_request(count, request, context, choice)
    return count


def _count_request(count: _Count, request: Request, length: int, choice: Choice) -> None:
    """Add a request that starts behind ``length`` tokens."""
    for t, turn in enumerate(request.turns):
        asked, reference = len(turn.question_ids), len(turn.reference_ids)
        count.add(asked, choice.prompt_positions(asked))
        answer = min(choice.decode, reference) if choice.force else choice.decode
        count.add(answer, answer)
        count.decode += answer
        length += asked
        count.longest = max(count.longest, length + answer)
        if choice.feeds_back(request, t):
            count.add(reference, 0)
            length += reference
            count.longest = max(count.longest, length)
        else:
            length += answer


def _bytes(count: _Count, geometry: ModelGeometry, choice: Choice) -> int:
    heads = len(choice.kv_heads)
    vector = geometry.head_dim * geometry.item_bytes + _ROW_BYTES
    value = geometry.value_dim * geometry.item_bytes if choice.values else 0
    keys = count.tokens * heads * (vector + value)
    queries = count.queries * heads * geometry.group * vector
    return round(len(choice.layers) * (keys + queries + 2 * _FILE_BYTES))


def _pieces(sample: Sample) -> list[tuple[int, ...]]:
    turns = [turn for request in sample.requests for turn in request.turns]
    return [sample.context_ids, *(ids for turn in turns for ids in (turn.question_ids, turn.reference_ids))]
