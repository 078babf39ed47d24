"""Checks that need more than the profile itself: the policy's own rules, and the trace it came from."""

from __future__ import annotations

from typing import Any, Protocol

from kvtune.errors import InputError
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.profiles.resolved import Resolved
from kvtune.profiles.schema import Profile


class Fingerprinted(Protocol):
    """What :func:`check_trace` needs of a trace."""

    @property
    def model(self) -> str: ...

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


def check_trace(profile: Profile, trace: Fingerprinted | Any) -> None:
    """``InputError``, naming both, where the trace is of another model than the profile."""
    if profile.model.fingerprint != trace.fingerprint:
        raise InputError(
            f"the profile is for {profile.model.id} (fingerprint {profile.model.fingerprint}), "
            f"the trace is of {trace.model} (fingerprint {trace.fingerprint})",
            "validate it against a trace of the same weights",
        )


def check_model(profile: Profile, loaded: Fingerprinted | Any) -> None:
    """``InputError``, naming both, where a loaded model is not the profile's."""
    if profile.model.fingerprint != loaded.fingerprint:
        raise InputError(
            f"the profile is for {profile.model.id} (fingerprint {profile.model.fingerprint}), "
            f"this model is {loaded.id} (fingerprint {loaded.fingerprint})",
            "tune a profile for this model",
        )
