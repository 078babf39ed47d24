"""Where tensors are computed on."""

from __future__ import annotations

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
