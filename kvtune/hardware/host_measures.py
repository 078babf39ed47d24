"""What the host and its link to the device can do, one measurement a function."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from kvtune.hardware.clock import seconds_of, wall_seconds_of
from kvtune.hardware.device_measures import copy_rate
from kvtune.hardware.machine import Disk, Host, Link, TransferRate

_PIECE = 8 << 20


def link(device: torch.device, sizes: Sequence[int], repeats: int) -> Link | None:
    """Host to device by size of the transfer, pinned and pageable; ``None`` without a GPU.

    Where the system refuses to pin memory, the pageable rates stand for the pinned ones.
    """
    if device.type != "cuda":
        return None
    pageable = transfer_rates(device, sizes, repeats, pinned=False)
    try:
        pinned = transfer_rates(device, sizes, repeats, pinned=True)
    except RuntimeError:
        pinned = pageable
    return Link(pinned=pinned, pageable=pageable)


def transfer_rates(
    device: torch.device, sizes: Sequence[int], repeats: int, pinned: bool
) -> tuple[TransferRate, ...]:
    """Bytes per second of one transfer of each size, ascending."""
    return tuple(
        TransferRate(bytes=size, bytes_per_second=_transfer_rate(device, size, repeats, pinned))
        for size in sorted(set(sizes))
    )


def _transfer_rate(device: torch.device, size: int, repeats: int, pinned: bool) -> float:
    source = torch.ones(size, dtype=torch.uint8)
    if pinned:
        source = source.pin_memory()
    target = torch.empty(size, dtype=torch.uint8, device=device)
    body = partial(target.copy_, source, non_blocking=pinned)
    # A pageable copy goes through a buffer of the driver: the host takes part in it.
    clock = seconds_of if pinned else wall_seconds_of
    return size / clock(body, device, repeats)


def host(n_bytes: int, repeats: int) -> Host:
    """Size of the host's memory, and the rate of a copy in it."""
    rate = copy_rate(torch.device("cpu"), n_bytes, repeats)
    return Host(memory_bytes=memory_bytes(), copy_bytes_per_second=rate)


def memory_bytes() -> int | None:
    """Bytes of the host's memory, ``None`` where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def disk(folder: Path, n_bytes: int) -> Disk | None:
    """Sequential reading of ``n_bytes`` just written to the disk of ``folder`` and dropped from memory.

    ``None`` where they cannot be written. The file has no name and is gone at the end.
    """
    piece = os.urandom(min(_PIECE, n_bytes))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(-(-n_bytes // len(piece))):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            read, start = 0, perf_counter()
            while got := file.read(_PIECE):
                read += len(got)
            return Disk(read_bytes_per_second=read / (perf_counter() - start))
    except OSError:
        return None
