"""What a profile is about: the model, its geometry, the workload, the machine, and where it came from."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, model_validator

from kvtune.geometry import ModelGeometry
from kvtune.profiles.evidence import Count, Strict

Text = Annotated[str, Field(min_length=1)]


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line without control characters")
    return text


Line = Annotated[Text, AfterValidator(_one_line)]
"""Text that is safe in file names and in a line of a script."""


class RopeOverride(Strict):
    """Rope that the model was run with instead of its own: ``yarn:4``, and its length where it matters."""

    override: Line
    length: Count | None = None


class Model(Strict):
    """Model id, fingerprint of its weights and configuration, and rope override, as in the trace."""

    id: Line
    fingerprint: Line
    rope: RopeOverride | None = None

    @property
    def basename(self) -> str:
        """The last part of the id: a file name that no id can lead out of its folder."""
        name = self.id.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
        return name.lstrip(".") or "model"


class Geometry(Strict):
    """:class:`kvtune.geometry.ModelGeometry` as it is written in a profile, field by field."""

    n_layers: Count
    n_heads: Count
    n_kv_heads: Count
    head_dim: Count
    value_dim: Count
    dtype: Literal["float32", "float16", "bfloat16"]
    max_positions: Count
    scaling: Annotated[float, Field(gt=0)]
    windows: tuple[Count | None, ...]
    softcaps: tuple[float | None, ...]
    sinks: tuple[bool, ...]
    alibi: bool = False
    rope: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, values in (("windows", self.windows), ("softcaps", self.softcaps), ("sinks", self.sinks)):
            if len(values) != self.n_layers:
                raise ValueError(f"{name} has {len(values)} entries for {self.n_layers} layers")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.n_heads} heads cannot share {self.n_kv_heads} kv heads evenly")
        return self

    def to_model(self) -> ModelGeometry:
        """The same geometry as the instrument's dataclass."""
        return ModelGeometry.from_dict(self.model_dump())


class Workload(Strict):
    """What the traces held: task name, how many samples, requests a sample, turns a request, steps a turn."""

    task: Text
    samples: Count
    requests: Count = 1
    turns: Count = 1
    decode_steps: Annotated[int, Field(ge=0)] = 0
    settings: dict[str, JsonValue] = Field(default_factory=dict)


class Hardware(Strict):
    """The machine that the profile is for."""

    name: Text
    device: Text
    memory_bytes: Count | None = None
    cores: Count | None = None


class Provenance(Strict):
    """How to make this profile again: kvtune's version, the trace, the seed and the trials completed."""

    kvtune: Text
    trace: Text | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    trials: Annotated[int, Field(ge=0)] | None = None
