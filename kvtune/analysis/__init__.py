"""What a trace says: locality, concentration, and what a policy costs and loses."""

from __future__ import annotations

from kvtune.analysis.analyze import analyze
from kvtune.analysis.compare import compare
from kvtune.analysis.evaluate import LayerEvaluation, access_log, evaluate, true_scores
from kvtune.analysis.sensitivity import sensitivity
from kvtune.analysis.statistics import bootstrap_interval

__all__ = [
    "LayerEvaluation",
    "access_log",
    "analyze",
    "bootstrap_interval",
    "compare",
    "evaluate",
    "sensitivity",
    "true_scores",
]
