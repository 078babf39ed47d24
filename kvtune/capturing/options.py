"""What can be chosen about a capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtune.capturing.recording import Choice
from kvtune.errors import InputError
from kvtune.geometry import ModelGeometry
from kvtune.workloads import PromptFile, Workload


@dataclass(frozen=True)
class CaptureOptions:
    """Options of :func:`kvtune.capture`.

    context         tokens of each context (None: the task's default; a prompt file's: as they are)
    samples         contexts (None: all of a prompt file, one of a task)
    requests        requests over each context
    turns           turns of each request (None: the task's default)
    decode          answer tokens per turn at most; each is one decode step and has one query
    force           the reference answers are fed as answers (teacher forcing)
    keep_answers    later turns follow the model's own answers, not the references
    layers          layers kept (None: all); kv_heads: kv heads kept, with their query heads (None: all)
    values          keep values; without them a trace tells recall, but no output error
    o_proj          keep each layer's output projection, so that errors can be measured after it
    prompt_queries  last positions of the context and of each question whose queries are kept (None: all)
    rope            override of the rotary positions, like ``yarn:4``
    device, dtype   see :func:`kvtune.models.load_model`
    seed            of the workload
    """

    context: int | None = None
    samples: int | None = None
    requests: int = 1
    turns: int | None = None
    decode: int = 64
    force: bool = False
    keep_answers: bool = False
    layers: Sequence[int] | None = None
    kv_heads: Sequence[int] | None = None
    values: bool = True
    o_proj: bool = False
    prompt_queries: int | None = 1024
    rope: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.decode < 1:
            raise InputError(f"--decode must be at least 1, not {self.decode}")
        if self.prompt_queries is not None and self.prompt_queries < 0:
            raise InputError(f"--prompt-queries must be 'all' or at least 0, not {self.prompt_queries}")
        if self.force and self.keep_answers:
            raise InputError("--force and --keep-answers exclude each other: forced answers always stay")

    def counts(self, workload: Workload) -> tuple[int, int]:
        """Samples and turns, with the workload's own where none are given."""
        samples = len(workload) if isinstance(workload, PromptFile) else 1
        return (
            samples if self.samples is None else self.samples,
            workload.default_turns if self.turns is None else self.turns,
        )

    def choice(self, geometry: ModelGeometry) -> Choice:
        """What the recorder keeps of a model of this geometry. Raises ``InputError`` on a bad index."""
        return Choice(
            layers=_indices(self.layers, geometry.n_layers, "layer"),
            kv_heads=_indices(self.kv_heads, geometry.n_kv_heads, "kv head"),
            values=self.values,
            prompt_queries=self.prompt_queries,
            decode=self.decode,
            force=self.force,
            keep_answers=self.keep_answers,
        )


def _indices(wanted: Sequence[int] | None, count: int, what: str) -> tuple[int, ...]:
    if wanted is None:
        return tuple(range(count))
    if not wanted:
        raise InputError(f"no {what} is chosen")
    for index in wanted:
        if not 0 <= index < count:
            raise InputError(f"{what} {index} is out of range", f"there are {count}: 0-{count - 1}")
    return tuple(sorted(set(wanted)))
