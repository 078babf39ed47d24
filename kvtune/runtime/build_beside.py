"""The index built beside the prefill: a layer's while the model goes on with the next layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvtune.kernels.attend import side_stream
from kvtune.runtime.fused_decoder import FusedDecoder, KeysValues


class BuildBeside:
    """Builds a prepared decoder's layers, each as soon as the model's cache holds its keys and values.

    On a GPU every layer is built on a second stream, which waits for the model's stream where :meth:`layer`
    is entered; :meth:`join` lets the model's stream wait for all of it. Nothing waits on the host in between,
    so that the next layer's work is launched at once. Elsewhere a layer is built before the model goes on.

    What is allocated there belongs to the second stream, whose work always waits for the model's stream
    before it begins: memory that is freed later is not written before its last reader is done. What it
    reads (the model's cache, prompt queries) must be kept until :meth:`join`.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        prompts: KeysValues,
        prompt_queries: Callable[[int, int], Tensor] | None = None,
    ) -> None:
        self.decoder, self.length = decoder, max(decoder.lengths)
        self.seconds = 0.0
        """Host time of the layers built where there is no second stream; else 0."""
        self._prompts, self._queries = prompts, prompt_queries
        self._stream = side_stream(decoder.loaded.device, 2)

    @contextmanager
    def layer(self, number: int) -> Iterator[None]:
        """The body launches what needs not be done before this layer's build; its keys are there already."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        yield
        self._build(number)

    def join(self) -> None:
        """Build what was not, and let the model's stream wait for all layers."""
        for number in range(len(self.decoder.layers), self.decoder.loaded.geometry.n_layers):
            with self.layer(number):
                pass
        self.drop()
        self.decoder.finish()

    def drop(self) -> None:
        """Let the model's stream wait for what was launched (after an exception: before it is freed)."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _build(self, number: int) -> None:
        # The model runs in inference mode, whose tensors could not be changed by later steps.
        with torch.inference_mode(False), torch.no_grad():
            if self._stream is not None:
                with torch.cuda.stream(self._stream):
                    self.decoder.build_layer(number, self._prompts, self._queries)
                return
            started = time.perf_counter()
            self.decoder.build_layer(number, self._prompts, self._queries)
            self.seconds += time.perf_counter() - started
