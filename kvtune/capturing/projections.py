"""A layer's output projection: what turns attention outputs into the residual stream."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvtune.errors import InputError
from kvtune.models import attention_modules

_NAMES = ("o_proj", "out_proj", "dense", "wo", "c_proj")


def output_projection(model: PreTrainedModel, layer: int) -> Tensor:
    """Weight [hidden, Hq × dv] of layer ``layer``'s output projection.

    Raises ``InputError``, naming the layer class, if it has none that is a plain linear map.
    """
    attention = attention_modules(model)[layer]
    for name in _NAMES:
        projection: Any = getattr(attention, name, None)
        if isinstance(projection, nn.Linear):
            return projection.weight.detach()
        if type(projection).__name__ == "Conv1D":  # GPT-2's linear layer, stored the other way round
            return projection.weight.detach().T
    raise InputError(
        f"layer {layer} of this model ({type(attention).__name__}) has no linear output projection",
        "capture without --o-proj",
    )
