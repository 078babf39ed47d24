"""What differs between two profiles, key by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtune.profiles.schema import Profile


@dataclass(frozen=True)
class Change:
    """One key whose value differs; ``None`` where a profile does not have it."""

    key: str
    first: Any
    second: Any

    @property
    def ratio(self) -> float | None:
        """second ÷ first where both are numbers and first is not 0."""
        if _is_number(self.first) and _is_number(self.second) and self.first:
            return self.second / self.first
        return None


def diff_profiles(first: Profile, second: Profile) -> list[Change]:
    """Every key path with different values, in schema order (keys only in ``second`` come last)."""
    left, right = flatten(first), flatten(second)
    keys = [*left, *(key for key in right if key not in left)]
    return [
        Change(key, left.get(key), right.get(key)) for key in keys if not _same(left.get(key), right.get(key))
    ]


def flatten(profile: Profile) -> dict[str, Any]:
    """Key path → plain value of every leaf; a list of plain values is a leaf."""
    return dict(_leaves(profile.model_dump(exclude_none=True), ()))


def _leaves(value: Any, path: tuple[str, ...]) -> Any:
    nested = isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif nested:
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, str(index)))
    else:
        yield ".".join(path), list(value) if isinstance(value, tuple) else value


def _same(first: Any, second: Any) -> bool:
    """Equal in value and kind: 1 and true differ, 1 and 1.0 do not."""
    return first == second and isinstance(first, bool) == isinstance(second, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
