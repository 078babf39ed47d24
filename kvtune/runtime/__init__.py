"""Live sparse decoding of a real model, with a block cache that counts."""

from kvtune.runtime.deployed import apply_profile
from kvtune.runtime.hook import attached
from kvtune.runtime.live import live
from kvtune.runtime.sequence import Sequence

__all__ = ["Sequence", "apply_profile", "attached", "live"]
