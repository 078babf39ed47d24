"""``niah_multiquery``: five numbers hidden in one context; each turn of a conversation asks for another."""

from __future__ import annotations

import random

from kvtune.workloads.haystack import Needle
from kvtune.workloads.needle_task import NeedleTask

_NEEDLES = 5


class NiahMultiquery(NeedleTask):
    """All requests share the needles (five, or one a turn if there are more turns), each in its own order."""

    name = "niah_multiquery"
    title = "five numbers hidden in filler, one asked a turn"
    default_turns = _NEEDLES

    def needles(self, turns: int, requests: int) -> int:
        return max(turns, _NEEDLES)

    def asked(
        self, rng: random.Random, needles: list[Needle], turns: int, requests: int
    ) -> list[list[Needle]]:
        return [rng.sample(needles, turns) for _ in range(requests)]
