"""What every replacement policy offers: a replay of one unit's accesses at a capacity in pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvtune.caching.access_log import UnitAccesses
from kvtune.caching.tally import WARM_UP_STEPS, Tally, count_accesses, count_hits


class Cache(ABC):
    """A replacement policy; stateless, every replay starts from an empty cache.

    Class attributes: ``name`` (command line and profiles), ``title`` (how results are labelled),
    ``source`` (paper or code).
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]

    @abstractmethod
    def page_hits(self, accesses: UnitAccesses, capacity: int) -> NDArray[np.bool_]:
        """Whether each page access hits, [sum of pages], with room for ``capacity`` pages.

        A block of p pages accesses its pages 0…p-1 in order. Raises ``InputError`` where a step reads a
        block twice.
        """

    def tally(self, accesses: UnitAccesses, capacities: Sequence[int], warm_up: int = WARM_UP_STEPS) -> Tally:
        """Hits at each of ``capacities`` (pages, any order); warm counts skip ``warm_up`` steps."""
        hits = [count_hits(accesses, self.page_hits(accesses, c), warm_up) for c in capacities]
        counted = np.stack(hits) if hits else np.zeros((0, 2, 3), np.int64)
        return Tally(counted, count_accesses(accesses, warm_up))
