"""The product: what tuning recommends, as a strict and versioned file that engines can be given."""

from __future__ import annotations

from kvtune.profiles.diff import Change, diff_profiles
from kvtune.profiles.io import load_profile, parse_profile, save_profile, to_yaml
from kvtune.profiles.resolved import Resolved
from kvtune.profiles.schema import PerToken, Profile

__all__ = [
    "Change",
    "PerToken",
    "Profile",
    "Resolved",
    "diff_profiles",
    "load_profile",
    "parse_profile",
    "save_profile",
    "to_yaml",
]
