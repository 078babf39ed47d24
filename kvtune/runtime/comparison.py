"""An answer under the plan beside the same answer under full attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AnswerComparison:
    """What forcing one answer showed, on the CPU.

    kl [A]: nats from full attention's distribution to the plan's at each step; top1 [A]: 1 where the most
    likely token is the same; nll_full, nll_plan [n]: nats of each forced token that was predicted.
    """

    turn: int
    kl: Tensor
    top1: Tensor
    nll_full: Tensor
    nll_plan: Tensor


class Comparer:
    """Compares logits step by step, so that only full attention's need be kept.

    ``tokens`` [A] are forced. Negative log-likelihoods are of the first ``n_reference`` of them and the end
    token that follows (the lowest of ``eos_ids``); without a reference, of all tokens. The token that a step
    feeds is predicted by the step before, so the first one has none.
    """

    def __init__(self, tokens: tuple[int, ...], n_reference: int, eos_ids: Iterable[int]) -> None:
        self._targets = [*tokens[1:]]
        if n_reference:
            self._targets = [*tokens[1:n_reference], *sorted(eos_ids)[:1]]
        self._rows: list[Tensor] = []

    def step(self, full: Tensor, plan: Tensor) -> None:
        """Logits [V] after the next forced token, under full attention and under the plan."""
        at = len(self._rows)
        reference, other = (torch.log_softmax(logits.float(), -1) for logits in (full, plan))
        kl = (reference.exp() * (reference - other)).sum()
        top1 = (reference.argmax() == other.argmax()).float()
        target = self._targets[at] if at < len(self._targets) else 0
        self._rows.append(torch.stack([kl, top1, -reference[target], -other[target]]))

    def result(self, turn: int) -> AnswerComparison:
        """All steps, as the answer of ``turn``."""
        kl, top1, nll_full, nll_plan = torch.stack(self._rows, 1).cpu()
        known = len(self._targets)
        return AnswerComparison(turn, kl, top1, nll_full[:known], nll_plan[:known])
