"""Which policy serves which layer: one method, layers kept dense, and per-layer parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvtune.geometry import LayerInfo
from kvtune.policies import get_policy
from kvtune.policies.base import Policy
from kvtune.policies.full import Full


@dataclass(frozen=True)
class Plan:
    """A policy over all layers of a model.

    ``dense_layers`` keep full attention, as every windowed layer does. ``overrides`` replaces parameters
    of single layers.
    """

    policy: Policy
    dense_layers: tuple[int, ...] = ()
    overrides: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def for_layer(self, layer: LayerInfo) -> Policy:
        """The policy that really serves ``layer``."""
        if layer.window is not None or layer.layer in self.dense_layers:
            return Full()
        override = self.overrides.get(layer.layer)
        if not override:
            return self.policy
        return get_policy(self.policy.name, {**self.policy.parameters(), **override})

    def with_layer(self, layer: int, **parameters: Any) -> Plan:
        """The same plan with ``parameters`` replaced in one layer."""
        merged = {**self.overrides, layer: {**self.overrides.get(layer, {}), **parameters}}
        return replace(self, overrides=merged)


def as_plan(policy: Policy | Plan) -> Plan:
    """A plain policy as the plan that uses it everywhere."""
    return policy if isinstance(policy, Plan) else Plan(policy)
