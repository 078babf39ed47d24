"""What every replacement policy offers: a replay of one unit's accesses at a capacity in pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

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
    def prepare(self, accesses: UnitAccesses) -> Any:
        """What :meth:`replay` needs of a unit at every capacity.

        Raises ``InputError`` where a step reads a block twice.
        """

    @abstractmethod
    def replay(self, prepared: Any, capacity: int) -> NDArray[np.bool_]:
        """Whether each page access hits, [sum of pages], with room for ``capacity`` pages."""

    def page_hits(self, accesses: UnitAccesses, capacity: int) -> NDArray[np.bool_]:
        """Whether each page access hits, [sum of pages]: a block of p pages reads its pages 0…p-1."""
        return self.replay(self.prepare(accesses), capacity)

    def tally(self, accesses: UnitAccesses, capacities: Sequence[int], warm_up: int = WARM_UP_STEPS) -> Tally:
        """Hits at each of ``capacities`` (pages, any order); warm counts skip ``warm_up`` steps."""
        prepared = self.prepare(accesses)
        hits = np.zeros((len(capacities), 2, 3), np.int64)
        for index, capacity in enumerate(capacities):
            hits[index] = count_hits(accesses, self.replay(prepared, capacity), warm_up)
        return Tally(hits, count_accesses(accesses, warm_up))
