"""Bytes of a model's weights, which a decode step reads once."""

from __future__ import annotations

from kvtune.errors import InputError
from kvtune.geometry import ModelGeometry
from kvtune.traces import Trace

_MLP_WIDTH = 3.5


def estimated_parameters(geometry: ModelGeometry) -> float:
    """Parameters of a model of which nothing but the geometry is known: an estimate, without embeddings.

    A hidden size of heads × dim, and a gated MLP 3.5 times as wide (Llama 3's proportions).
    """
    hidden = geometry.n_heads * geometry.head_dim
    attention = hidden * (2 * hidden + geometry.n_kv_heads * (geometry.head_dim + geometry.value_dim))
    mlp = 3 * _MLP_WIDTH * hidden * hidden
    return geometry.n_layers * (attention + mlp)


def weights_bytes(trace: Trace, parameters: float | None = None) -> tuple[float, str]:
    """Bytes of the weights at the trace's precision, and where their number comes from.

    ``given`` parameters, else those of a ``packaged`` model, else ``estimated`` from the geometry. Raises
    ``InputError`` for a number that is not above 0.
    """
    from kvtune.models.catalog import CATALOG

    if parameters is not None:
        if not parameters > 0:
            raise InputError(f"a model cannot have {parameters:g} parameters")
        count, source = parameters, "given"
    elif trace.model in CATALOG:
        count, source = CATALOG[trace.model].parameters, "packaged"
    else:
        count, source = estimated_parameters(trace.geometry), "estimated"
    return count * trace.geometry.item_bytes, source
