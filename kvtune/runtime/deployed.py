"""Running an exported profile inside transformers: the other end of the ``transformers`` exporter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvtune.errors import InputError
from kvtune.models.adapters import decoder_config
from kvtune.models.geometry import read_geometry, refuse_unserved
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.runtime.hook import attached
from kvtune.runtime.sequence import Sequence

FORMAT = 1
_CONTEXT = "_kvtune_attention"


def apply_profile(model: PreTrainedModel, profile: str | Path) -> Sequence:
    """Make ``model`` decode under the profile in ``profile`` (a JSON file of the transformers export).

    From now on every ``model.generate`` of one sequence prefills densely and decodes sparsely; the returned
    :class:`Sequence` holds the state and the counters. Raises ``InputError`` for a file that is not such a
    profile, a model the hook cannot serve, or one with fewer layers than the profile names.
    """
    data = _read(Path(profile))
    refuse_unserved(model)
    geometry = read_geometry(decoder_config(model), str(model.dtype).removeprefix("torch."))
    overrides = {int(layer): own for layer, own in data["overrides"].items()}
    plan = Plan(get_policy(data["policy"], data["parameters"]), tuple(data["dense_layers"]), overrides)
    beyond = [n for n in (*plan.dense_layers, *overrides) if n >= geometry.n_layers]
    if beyond:
        raise InputError(f"the profile names layer {beyond[0]}, the model has {geometry.n_layers} layers")
    cache = data.get("cache")
    sequence = Sequence(plan, geometry, cache["fraction"] if cache else None)
    context = attached(model, sequence)
    context.__enter__()
    setattr(model, _CONTEXT, context)  # keeps the registration alive as long as the model
    return sequence


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise InputError(f"profile '{path}' cannot be read") from None
    except ValueError:
        raise InputError(f"'{path}' is not JSON") from None
    wanted = {"policy", "parameters", "overrides", "dense_layers"}
    if not isinstance(data, dict) or data.get("kvtune_runtime") != FORMAT or not wanted <= set(data):
        raise InputError(
            f"'{path}' is not a profile for kvtune's runtime (format {FORMAT})",
            "make one: kvtune profile export PROFILE --engine transformers",
        )
    return data
