"""Checks that need more than the profile itself: the policy's own rules, and the trace it came from."""

from __future__ import annotations

from typing import Protocol

from kvtune.errors import InputError
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.profiles.resolved import Resolved
from kvtune.profiles.schema import Profile


class TraceLike(Protocol):
    """What :func:`check_trace` needs of a trace."""

    @property
    def model(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...


class ModelLike(Protocol):
    """What :func:`check_model` needs of a loaded model."""

    @property
    def id(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...


def plan_of(resolved: Resolved) -> Plan:
    """The resolved profile as the instrument's plan. ``InputError`` where a policy refuses a parameter."""
    plan = Plan(get_policy(resolved.policy, resolved.parameters), resolved.dense_layers, resolved.overrides)
    for layer in resolved.overrides:
        get_policy(*resolved.layer(layer))
    return plan


def check_policy(profile: Profile) -> None:
    """``InputError`` where the policy is unknown or refuses a parameter, at either end of the range."""
    for length in (profile.context_length.min, profile.context_length.max):
        plan_of(profile.resolve(length))


def check_trace(profile: Profile, trace: TraceLike) -> None:
    """``InputError``, naming both, where the trace is of another model than the profile."""
    _require_same(profile, trace.fingerprint, f"the trace is of {trace.model}")


def check_model(profile: Profile, loaded: ModelLike) -> None:
    """``InputError``, naming both, where the model at hand is another than the profile's."""
    _require_same(profile, loaded.fingerprint, f"the model is {loaded.id}")


def _require_same(profile: Profile, fingerprint: str, other: str) -> None:
    if profile.model.fingerprint != fingerprint:
        raise InputError(
            f"the profile is for {profile.model.id} (fingerprint {profile.model.fingerprint}), "
            f"{other} (fingerprint {fingerprint})",
            "a profile holds for the weights it was tuned on",
        )
