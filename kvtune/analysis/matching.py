"""Equal bytes: the budget at which a policy reads what another one reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtune.errors import InputError
from kvtune.policies.base import Policy

TOLERANCE = 0.02
"""Read bytes this close to the target, relatively, count as equal."""
_PROBES = 40
_RESOLUTION = 1e-4
"""Real budgets closer than this, relatively, are one."""

Value = int | float
Measure = Callable[[Policy], float]


@dataclass(frozen=True)
class Match:
    """A policy at the budget found, what it reads, whether that is the target, and if not, why."""

    policy: Policy
    read_bytes: float
    matched: bool
    note: str = ""


def match_budget(policy: Policy, target: float, measure: Measure, longest: int) -> Match:
    """Set the ``budget`` of ``policy`` so that ``measure`` gives ``target`` bytes, within 2%.

    ``measure`` gives the mean read bytes of a policy, never falling with the budget. ``longest`` is the
    longest timeline in tokens: no budget above the lossless one is tried. Where no budget comes within 2%,
    the one that reads most among those that read no more is taken; where all read more, the least.
    """
    if policy.budget is None:
        read = measure(policy)
        matched = _near(read, target)
        return Match(policy, read, matched, "" if matched else "no budget to set")
    return _Search(policy, policy.budget, target, measure, longest).run()


def with_budget(policy: Policy, value: Value) -> Policy:
    """``policy`` with its budget replaced; ``InputError`` where it refuses the value."""
    assert policy.budget is not None
    return replace(policy, **{policy.budget: value})


def _near(read: float, target: float) -> bool:
    return abs(read - target) <= TOLERANCE * target


class _Search:
    """Brackets the target between two budgets and narrows them, by interpolation and halving in turn."""

    def __init__(self, policy: Policy, knob: str, target: float, measure: Measure, longest: int) -> None:
        self.policy, self.knob, self.target, self.measure = policy, knob, target, measure
        self.start: Value = getattr(policy, knob)
        self.whole = isinstance(self.start, int)
        self.lossless: Value | None = (type(policy).lossless(longest) or {}).get(knob)
        self.tried: dict[Value, float] = {}

    def run(self) -> Match:
        if not self._hit(self.start):
            if self.tried[self.start] > self.target:
                self._hit(self._floor())
            else:
                self._raise()
        for probe in range(_PROBES):
            ends = self._ends()
            if ends is None or self._found() is not None:
                break
            value = self._between(*ends, halve=probe % 2 == 1)
            if value is None:
                break
            self._hit(value)
        return self._best()

    def _hit(self, value: Value) -> bool:
        if value not in self.tried:
            self.tried[value] = self.measure(with_budget(self.policy, value))
        return _near(self.tried[value], self.target)

    def _found(self) -> Value | None:
        """The budget nearest to the target among those close enough."""
        near = [value for value, read in self.tried.items() if _near(read, self.target)]
        return min(near, key=lambda value: abs(self.tried[value] - self.target), default=None)

    def _ends(self) -> tuple[Value, Value] | None:
        """The largest budget known to read no more than the target, and the smallest known to read more."""
        under = [value for value, read in self.tried.items() if read <= self.target]
        over = [value for value, read in self.tried.items() if read > self.target]
        return (max(under), min(over)) if under and over else None

    def _between(self, low: Value, high: Value, halve: bool) -> Value | None:
        """A budget strictly between; ``None`` where there is none left."""
        if high - low <= (1 if self.whole else _RESOLUTION * high):
            return None
        below, above = self.tried[low], self.tried[high]
        if halve:
            value = math.sqrt(low * high) if high > 4 * low > 0 else (low + high) / 2
        else:
            value = low + (high - low) * (self.target - below) / (above - below)
        if self.whole:
            return min(max(round(value), int(low) + 1), int(high) - 1)
        margin = 0.01 * (high - low)
        return float(f"{min(max(value, low + margin), high - margin):.6g}")

    def _valid(self, value: Value) -> bool:
        try:
            with_budget(self.policy, value)
        except InputError:
            return False
        return True

    def _floor(self) -> Value:
        """The smallest budget the policy takes (of a real one, a millionth of the default)."""
        lowest: Value = 1 if self.whole else self.start * 1e-6
        return self._edge(self.start, lowest)

    def _raise(self) -> None:
        """Try budgets four times larger until one reads the target, up to the lossless or the largest one.

        Without a lossless budget, three that read the same are taken for the end.
        """
        value, same = self.start, 0
        limit = math.inf if self.lossless is None else max(self.lossless, self.start)
        while value < limit and same < 3:
            larger = self._edge(value, min(max(4 * value, 1 if self.whole else 1e-3), limit))
            if larger - value <= (0 if self.whole else _RESOLUTION * value):
                return
            if self._hit(larger) or self.tried[larger] > self.target:
                return
            same = same + 1 if self.tried[larger] == self.tried[value] else 0
            value = larger

    def _edge(self, good: Value, beyond: Value) -> Value:
        """The valid budget nearest to ``beyond``, seen from the valid ``good``."""
        if self._valid(beyond):
            return beyond
        while abs(beyond - good) > (1 if self.whole else _RESOLUTION * abs(good)):
            middle = (good + beyond) // 2 if self.whole else (good + beyond) / 2
            good, beyond = (middle, beyond) if self._valid(middle) else (good, middle)
        return good

    def _best(self) -> Match:
        found = self._found()
        if found is not None:
            return Match(with_budget(self.policy, found), self.tried[found], True)
        ends = self._ends()
        if ends is not None:
            value, note = ends[0], f"{self._told(ends[0])}, {self._told(ends[1])}"
        elif min(self.tried.values()) > self.target:
            value = min(self.tried)
            note = f"{self._told(value)}, and it can't read less"
        else:
            value = max(self.tried, key=lambda tried: (self.tried[tried], -tried))
            note = f"{self._told(value)}, and it can't read more"
        return Match(with_budget(self.policy, value), self.tried[value], False, note)

    def _told(self, value: Value) -> str:
        """How far from the target a budget is, in words."""
        off = self.tried[value] / self.target - 1
        return f"{self.knob}={value:,.6g} reads {abs(off):.0%} {'more' if off > 0 else 'less'}"
