"""Where tensors are computed on, and when it is at rest."""

from __future__ import annotations

import gc
import time

import torch

from kvtune.errors import InputError


def choose_device(device: str) -> torch.device:
    """``auto`` (the GPU if there is one), or a torch device that exists. Raises ``InputError`` otherwise."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        if place.type == "cuda":
            torch.cuda.get_device_properties(place)
    except (RuntimeError, AssertionError, ValueError):
        raise InputError(f"device '{device}' is not available here", "use cpu, cuda or auto") from None
    return place


def seconds_at_rest(device: torch.device) -> float:
    """The clock's seconds, once all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def release(device: torch.device) -> None:
    """Give back what is no longer used, so that it counts as free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
