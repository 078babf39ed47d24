"""Timed greedy steps of a fused decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.devices import seconds_at_rest
from kvtune.models import LoadedModel
from kvtune.runtime.fused_decoder import FusedDecoder

TRIALS = 2
"""Steps that capturing a graph makes and takes back: a decoder needs room for them."""


@dataclass(frozen=True)
class Decoded:
    """tokens [B, steps], and the seconds of each step."""

    tokens: Tensor
    seconds: list[float]


def capture_step(decoder: FusedDecoder, notes: list[str]) -> bool:
    """Make the step a CUDA graph and run it once. Whether it is one; a note says why it could not be."""
    device = decoder.loaded.device
    if device.type != "cuda":
        return False
    try:
        decoder.capture()
    except RuntimeError as error:
        note = f"a step of the batch could not be captured as a CUDA graph ({error}); it runs eagerly"
        if note not in notes:
            notes.append(note)
        return False
    mark = decoder.mark()
    decoder.step(torch.zeros(len(decoder.lengths), dtype=torch.int64, device=device))
    decoder.rewind(mark)
    return True


def greedy_steps(
    decoder: FusedDecoder, first: Tensor, steps: int, advance: Callable[[], None] = lambda: None
) -> Decoded:
    """``steps`` greedy tokens of every sequence, behind its ``first`` [B]."""
    tokens, seconds = [first], []
    for _ in range(steps):
        started = seconds_at_rest(decoder.loaded.device)
        logits = decoder.step(tokens[-1])
        seconds.append(seconds_at_rest(decoder.loaded.device) - started)
        tokens.append(likeliest(decoder.loaded, logits))
        advance()
    return Decoded(torch.stack(tokens[1:], 1), seconds)


def likeliest(loaded: LoadedModel, logits: Tensor) -> Tensor:
    """Each row's most likely token [B] that does not end the text: every sequence goes on to the end."""
    banned = torch.tensor(sorted(loaded.eos_ids), dtype=torch.int64, device=logits.device)
    return logits.index_fill(1, banned, -torch.inf).argmax(1)
