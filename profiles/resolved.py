"""A profile at one context length: plain values, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DENSE = "full"
"""Name of the policy that dense layers run."""


@dataclass(frozen=True)
class Resolved:
    """Policy parameters at ``context_length`` tokens.

    ``parameters`` hold for every layer; ``overrides`` has, for some layers, those that differ;
    ``dense_layers`` run full attention. ``extrapolated``: the profile was not tuned for this length.
    """

    context_length: int
    extrapolated: bool
    policy: str
    parameters: dict[str, Any]
    overrides: dict[int, dict[str, Any]]
    dense_layers: tuple[int, ...]

    def layer(self, index: int) -> tuple[str, dict[str, Any]]:
        """Policy name and all its parameters in layer ``index``."""
        if index in self.dense_layers:
            return DENSE, {}
        return self.policy, {**self.parameters, **self.overrides.get(index, {})}
