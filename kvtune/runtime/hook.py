"""The attention function that lets a transformers model decode through a :class:`Sequence`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvtune.capturing.hook import Listener, Sink
from kvtune.errors import InputError
from kvtune.models.adapters import attention_through, sdpa
from kvtune.runtime.sequence import Sequence


class SparseAttention:
    """A transformers attention function: dense for several tokens, the sequence's policy for one.

    While ``full`` is true, every token attends densely and ``sequence`` is left alone.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.full = False
        self._listener = Listener()

    def showing(self, sink: Sink, first: int = 0) -> AbstractContextManager[None]:
        """Show queries at positions ≥ ``first`` to ``sink`` for the length of a ``with`` block."""
        return self._listener.to(sink, first)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """query [1, Hq, T, d], key [1, H, N, d], value [1, H, N, dv] → output [1, T, Hq, dv]."""
        if query.shape[0] != 1:
            raise InputError("sparse decoding serves one sequence at a time", "use a batch of 1")
        number = int(module.layer_idx)  # type: ignore[arg-type]
        self._listener.show(number, query[0].transpose(0, 1), key.shape[2])
        if not self.full:
            # What a policy keeps outlives this call and is updated in place: no inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                output = self._take_part(number, query, key, value)
            if output is not None:
                return output.to(query.dtype)[None, None], None
        return sdpa(module, query, key, value, attention_mask, **kwargs)

    def _take_part(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """The sparse output [Hq, dv] of a decode step; ``None`` where attention stays dense."""
        if query.shape[2] > 1 or self.sequence.prefilling:
            self.sequence.prefill(number, query[0].transpose(0, 1), key[0], value[0])
        elif not self.sequence.layer(number).dense:
            return self.sequence.decode(number, query[0, :, 0], key[0], value[0])
        return None


def attached(model: PreTrainedModel, sequence: Sequence) -> AbstractContextManager[None]:
    """``model`` decodes through ``sequence`` for the length of a ``with`` block (under ``generate`` too)."""
    return attention_through(model, SparseAttention(sequence))
