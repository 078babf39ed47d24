"""The profile: what a tuning run recommends, for what, and on which evidence. Strict and versioned.

Deployable settings are ``model``, ``context_length``, ``policy``, ``overrides``, ``dense_layers``, ``cache``
and ``kv_precision``; everything else says where they come from and what they are expected to do.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, JsonValue, Tag, field_validator, model_validator

from kvtune.profiles.evidence import BreakEven, HeldOut, Live, Predicted, Strict
from kvtune.profiles.resolved import Resolved
from kvtune.profiles.subject import Geometry, Hardware, Model, Provenance, Workload

VERSION = 1
"""Format version written, and the newest that is read."""

Precision = Literal["native", "fp8", "int8", "int4", "kivi2"]


class PerToken(Strict):
    """A count that grows with the context: ``per_token`` × context length.

    Rounded to the nearest multiple of ``multiple``, then kept within ``minimum`` and ``maximum``.
    """

    per_token: Annotated[float, Field(gt=0)]
    minimum: Annotated[int, Field(ge=0)] = 1
    maximum: Annotated[int, Field(ge=0)] | None = None
    multiple: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.maximum is not None and self.maximum < self.minimum:
            raise ValueError(f"maximum {self.maximum} lies below minimum {self.minimum}")
        return self

    def at(self, context_length: int) -> int:
        """The count at ``context_length`` tokens."""
        count = round(self.per_token * context_length / self.multiple) * self.multiple
        count = max(count, self.minimum)
        return count if self.maximum is None else min(count, self.maximum)


def is_function(value: Any) -> bool:
    """Whether a parameter, parsed or plain, is a function of the context length."""
    return isinstance(value, dict | PerToken)


def _form(value: Any) -> str:
    return "function" if is_function(value) else "value"


Parameter = Annotated[
    Annotated[PerToken, Tag("function")] | Annotated[JsonValue, Tag("value")], Discriminator(_form)
]
"""A fixed value or a function of the context length."""

Layer = Annotated[int, Field(ge=0)]


class ContextRange(Strict):
    """Context lengths, in tokens, that the profile was tuned for (both ends included)."""

    min: Annotated[int, Field(ge=1)]
    max: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max {self.max} lies below min {self.min}")
        return self


class PolicyChoice(Strict):
    """A policy by name with the parameters that differ from, or restate, its defaults."""

    name: Annotated[str, Field(min_length=1)]
    parameters: dict[str, Parameter] = Field(default_factory=dict)


class Cache(Strict):
    """GPU block cache: replacement policy and cache fraction (page slots × 8 ÷ context tokens)."""

    policy: Literal["wave", "lru"]
    fraction: Annotated[float, Field(gt=0, le=1)]


class KVPrecision(Strict):
    """Storage of keys and values; ``native`` is the model's own dtype."""

    keys: Precision = "native"
    values: Precision = "native"


class Profile(Strict):
    """One tuned recommendation. Build it with :func:`kvtune.profiles.parse_profile` from plain data."""

    SETTINGS: ClassVar = (
        "model",
        "context_length",
        "policy",
        "overrides",
        "dense_layers",
        "cache",
        "kv_precision",
    )

    kvtune_profile: Literal[1] = 1
    model: Model
    geometry: Geometry
    context_length: ContextRange
    policy: PolicyChoice
    overrides: dict[Layer, dict[str, Parameter]] = Field(default_factory=dict)
    dense_layers: tuple[Layer, ...] = ()
    cache: Cache | None = None
    kv_precision: KVPrecision = KVPrecision()
    workload: Workload | None = None
    hardware: Hardware | None = None
    predicted: Predicted | None = None
    held_out: HeldOut | None = None
    live: Live | None = None
    break_even: tuple[BreakEven, ...] | None = None
    provenance: Provenance

    @field_validator("dense_layers")
    @classmethod
    def _ascending(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        if list(layers) != sorted(set(layers)):
            raise ValueError("layers must be ascending, each once")
        return layers

    @model_validator(mode="after")
    def _layers_exist(self) -> Self:
        n_layers = self.geometry.n_layers
        for name, layers in (("dense_layers", self.dense_layers), ("overrides", self.overrides)):
            for layer in layers:
                if layer >= n_layers:
                    raise ValueError(
                        f"{name} names layer {layer}, but the model has layers 0 to {n_layers - 1}"
                    )
        both = sorted(set(self.dense_layers) & set(self.overrides))
        if both:
            raise ValueError(f"layer {both[0]} is both in dense_layers and in overrides")
        return self

    def resolve(self, context_length: int) -> Resolved:
        """All parameters as plain values at ``context_length`` tokens (functions evaluated).

        Any length ≥ 1 may be asked for; ``Resolved.extrapolated`` says if it lies outside the tuned range.
        """
        if context_length < 1:
            raise ValueError(f"context_length must be at least 1, not {context_length}")
        base = _evaluate(self.policy.parameters, context_length)
        overrides = {layer: _evaluate(own, context_length) for layer, own in self.overrides.items()}
        return Resolved(
            context_length=context_length,
            extrapolated=not self.context_length.min <= context_length <= self.context_length.max,
            policy=self.policy.name,
            parameters=base,
            overrides=overrides,
            dense_layers=self.dense_layers,
        )

    def settings(self) -> dict[str, Any]:
        """Every deployable setting as a flat mapping from key path to plain value (nulls left out).

        The fingerprint, the geometry and the evidence are not settings: no engine is configured with them.
        """
        data = self.model_dump(include=set(self.SETTINGS))
        del data["model"]["fingerprint"]
        return dict(_leaves(data, ()))


def _evaluate(parameters: dict[str, Any], context_length: int) -> dict[str, Any]:
    return {
        name: value.at(context_length) if isinstance(value, PerToken) else value
        for name, value in parameters.items()
    }


def _leaves(value: Any, path: tuple[str, ...]) -> Any:
    """(dotted key, value) of every leaf; a function of the context and a list are leaves."""
    if isinstance(value, dict) and "per_token" not in value:
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif value is not None and value != ():
        yield ".".join(path), list(value) if isinstance(value, tuple) else value
