"""The attention function that lets a transformers model decode through a :class:`Sequence`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvtune.errors import InputError
from kvtune.runtime.sequence import Sequence

NAME = "kvtune_sparse"
_SEQUENCE = "_kvtune_sequence"


def sparse_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """A transformers attention function: dense for several tokens, the sequence's policy for one.

    query [1, Hq, T, d], key [1, H, N, d], value [1, H, N, dv] → output [1, T, Hq, dv].
    """
    sequence: Sequence = getattr(module, _SEQUENCE)
    if query.shape[0] != 1:
        raise InputError("sparse decoding serves one sequence at a time", "use a batch of 1")
    number = int(module.layer_idx)  # type: ignore[arg-type]
    if query.shape[2] > 1:
        sequence.prefill(number, query[0].transpose(0, 1), key[0], value[0])
    elif not sequence.layer(number).dense and key.shape[2] > 1:
        output = sequence.decode(number, query[0, :, 0], key[0], value[0])
        return output.to(query.dtype)[None, None], None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def attach(model: nn.Module, sequence: Sequence) -> None:
    """Make ``model`` decode through ``sequence`` from now on (also under its own ``generate``)."""
    AttentionInterface.register(NAME, sparse_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    for module in attention_modules(model):
        setattr(module, _SEQUENCE, sequence)
    model.set_attn_implementation(NAME)  # type: ignore[operator]


@contextmanager
def attached(model: nn.Module, sequence: Sequence) -> Iterator[None]:
    """:func:`attach` for the length of a ``with`` block; the model's own attention comes back after it."""
    before = model.config._attn_implementation  # type: ignore[union-attr]
    attach(model, sequence)
    try:
        yield
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
        for module in attention_modules(model):
            delattr(module, _SEQUENCE)


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that call an attention function, one per layer."""
    return [m for m in model.modules() if hasattr(m, "layer_idx") and type(m).__name__.endswith("Attention")]
