"""A-shape: the sparse-prefill pattern of sinks and a local window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvtune.geometry import ModelGeometry
from kvtune.policies.streaming import Streaming


@dataclass(frozen=True)
class AShape(Streaming):
    """Every query of the prompt attends the first ``sink`` (128) tokens and the last ``recent`` (3968).

    A pattern for prefill (MInference's ``n_init`` and ``n_local``): its cost and error there are what
    :func:`kvtune.analysis.prefill.prefill_pattern_error` measures on the recorded prompt queries. As a policy
    it goes on in the same way while decoding: StreamingLLM with a longer window. The keys and
    values of the trace are those of a dense prefill.
    """

    sink: int = 128
    recent: int = 3968

    name: ClassVar[str] = "a_shape"
    title: ClassVar[str] = "A-shape"
    source: ClassVar[str] = "Jiang et al., MInference, arXiv 2407.02490; SCBench, arXiv 2412.10319"

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        return {
            "sink": trial.suggest_categorical("sink", [4, 32, 128]),
            "recent": trial.suggest_int("recent", 32, max(context_length, 64), log=True),
        }
