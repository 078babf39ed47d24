"""``niah_single``: find a number hidden in filler, at depths that vary from sample to sample."""

from __future__ import annotations

import random

from kvtune.workloads.haystack import Needle
from kvtune.workloads.needle_task import NeedleTask


class NiahSingle(NeedleTask):
    """Every question asks for a needle of its own: one turn and one request make a single needle."""

    name = "niah_single"
    title = "a number hidden in filler, one needle a question"

    def needles(self, turns: int, requests: int) -> int:
        return turns * requests

    def asked(
        self, rng: random.Random, needles: list[Needle], turns: int, requests: int
    ) -> list[list[Needle]]:
        shuffled = list(needles)
        rng.shuffle(shuffled)
        return [shuffled[r * turns : (r + 1) * turns] for r in range(requests)]
