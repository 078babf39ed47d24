"""Stage constants from whole steps: each stage by what a step loses without it, all by the step's own time.

In one CUDA graph, stages overlap: the next kernel starts while the last one drains, estimates are made
beside exact attention. Stages timed alone therefore add up to more than the step. Differences between a
step with and without a stage add up to the step exactly, whatever is hidden being charged to nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtune.errors import InputError
from kvtune.hardware.cost import Features
from kvtune.hardware.fit import Array, as_columns, as_stage, nonnegative_least_squares, useful_columns
from kvtune.hardware.machine import Stage

_WHOLE = 3.0
"""How much an error of the whole step weighs, against the same error of one stage."""

_ROUNDS, _TOLERANCE = 400, 1e-5


@dataclass(frozen=True)
class StepSample:
    """One setting: ``whole`` seconds of a step, made of the stages in ``features``.

    ``seconds``: of those stages that were told apart, what the step loses without each; it may be 0 or less.
    """

    features: Mapping[str, Features]
    seconds: Mapping[str, float]
    whole: float


class _Block:
    """The three constants of one stage, and where it occurs among the samples."""

    def __init__(self, name: str, samples: Sequence[StepSample]) -> None:
        self.at = np.array([place for place, sample in enumerate(samples) if name in sample.features])
        mine = [samples[place] for place in self.at]
        self.columns = as_columns(sample.features[name] for sample in mine)
        self.own = np.array([sample.seconds.get(name, np.nan) for sample in mine])
        self.whole = np.array([sample.whole for sample in mine])
        self.useful = useful_columns(self.columns)
        self.constants: Array = np.zeros(3)

    @property
    def predicted(self) -> Array:
        """Seconds in each of its samples."""
        found: Array = self.columns @ self.constants
        return found

    @property
    def errors(self) -> Array:
        """Predicted less measured where it was told apart, as shares of the whole step."""
        known = ~np.isnan(self.own)
        found: Array = ((self.predicted - self.own) / self.whole)[known]
        return found

    def refit(self, left: Array) -> None:
        """The best constants where the other stages leave ``left`` seconds of each whole step."""
        rows = self.columns[:, self.useful] / self.whole[:, None]
        known = ~np.isnan(self.own)
        matrix = np.concatenate([rows[known], _WHOLE * rows])
        target = np.concatenate([(self.own / self.whole)[known], _WHOLE * left / self.whole])
        self.constants = np.zeros(3)
        self.constants[self.useful] = nonnegative_least_squares(matrix, target)


def fit_steps(samples: Sequence[StepSample]) -> tuple[dict[str, Stage], float]:
    """Stages that were told apart in some sample, and the largest error of a whole step.

    Minimises the squared errors of all differences and, weighted more, of all whole steps, each relative to
    its whole step, with no constant below 0: one stage at a time until nothing moves, which for squares and
    bounds on single stages leads to the one minimum. A stage's ``worst_error`` is relative to the whole step.
    Raises ``InputError`` where a step's time is not above 0, or a stage is in no sample's ``seconds``.
    """
    if not all(np.isfinite(sample.whole) and sample.whole > 0 for sample in samples):
        raise InputError("a step cannot be fitted to a time that is not above 0")
    names = sorted({name for sample in samples for name in sample.features})
    told = {name for sample in samples for name in sample.seconds}
    for name in names:
        if name not in told:
            raise InputError(f"stage '{name}' was never told apart from the others")
    blocks = {name: _Block(name, samples) for name in names}
    whole = np.array([sample.whole for sample in samples])
    predicted = np.zeros(len(samples))
    for _ in range(_ROUNDS):
        moved = 0.0
        for block in blocks.values():
            before = block.predicted
            rest = predicted[block.at] - before
            block.refit(block.whole - rest)
            predicted[block.at] = rest + block.predicted
            moved = max(moved, float(np.abs((block.predicted - before) / block.whole).max()))
        if moved < _TOLERANCE:
            break
    stages = {
        name: as_stage(block.constants, len(block.errors), float(np.abs(block.errors).max()))
        for name, block in blocks.items()
    }
    return stages, float(np.abs(predicted / whole - 1).max()) if len(samples) else 0.0
