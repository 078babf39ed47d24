"""What running a command line gives."""

from __future__ import annotations

from typing import NamedTuple


class Ran(NamedTuple):
    exit_code: int
    out: str
    err: str
