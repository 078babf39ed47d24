"""Search settings on recorded traces, and check the choice on samples held out."""

from kvtune.tuning.bench import Bench, Score
from kvtune.tuning.space import Candidate, shipped_default
from kvtune.tuning.study import Constraints
from kvtune.tuning.tune import TuneResult, tune

__all__ = ["Bench", "Candidate", "Constraints", "Score", "TuneResult", "shipped_default", "tune"]
