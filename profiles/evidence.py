"""The evidence in a profile: predictions with intervals, the held-out check, live results, break-even."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    """Base of all profile parts: exact types, no unknown keys, no NaN, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Interval(Strict):
    """A value with its confidence interval (low ≤ value ≤ high), or without one where none is known."""

    value: float
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if (self.low is None) != (self.high is None):
            raise ValueError("low and high must be given together")
        if self.low is not None and self.high is not None and not self.low <= self.value <= self.high:
            raise ValueError(f"{self.value} lies outside its interval [{self.low}, {self.high}]")
        return self


class IntervalSpread(Strict):
    """Mean and 95th percentile over queries, each with an interval."""

    mean: Interval
    p95: Interval


class Spread(Strict):
    """Mean and 95th percentile over queries."""

    mean: NonNegative
    p95: NonNegative


class HitRatio(Strict):
    """Hit ratios by unit, from an empty cache."""

    request: Share
    page: Share
    token: Share


class Predicted(Strict):
    """What the search samples and the simulator predict; intervals are at ``level`` (0.95).

    ``output_error`` is ‖o − o_full‖/‖o_full‖; ``hit_ratio`` is page-weighted, from an empty cache; bytes are
    per decode step over ``layers`` (``None``: all) and their kv heads; ``gpu_bytes`` is resident memory.
    """

    level: Annotated[float, Field(gt=0, lt=1)] = 0.95
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    output_error: IntervalSpread
    read_bytes_per_step: Interval
    hit_ratio: Interval | None = None
    transfer_bytes_per_step: Interval | None = None
    attention_mass: Interval | None = None
    effective_tokens: Interval | None = None
    gpu_bytes: Interval | None = None
    seconds_per_step: Interval | None = None


class Measured(Strict):
    """One setting measured on held-out samples; ``parameters`` where it is not the profile's own."""

    parameters: dict[str, JsonValue] = Field(default_factory=dict)
    output_error: Spread
    read_bytes_per_step: NonNegative
    hit_ratio: Share | None = None


class HeldOut(Strict):
    """The chosen setting against RetroInfer's shipped defaults, on samples the search never saw.

    ``difference`` is chosen − default of the mean output error, paired by unit: below 0 the choice wins.
    """

    samples: Count
    chosen: Measured
    default: Measured
    winner: Literal["chosen", "default", "tie"]
    difference: Interval | None = None


class DeltaNLL(Strict):
    """Paired change of the forced answer's negative log-likelihood (nats a token), bootstrap interval."""

    mean: float
    low: float
    high: float


class Live(Strict):
    """A live run of the profile against full attention on the same forced tokens."""

    context_length: Count
    kl: Spread
    delta_nll: DeltaNLL
    top1: Share
    hit_ratio: HitRatio | None = None
    replayed_hit_ratio: HitRatio | None = None
    tokens_per_second: NonNegative
    full_tokens_per_second: NonNegative


class BreakEven(Strict):
    """Speed against full attention at one point, index build included (above 1: it pays)."""

    context_length: Count
    batch_size: Count
    output_length: Count
    speedup: NonNegative
