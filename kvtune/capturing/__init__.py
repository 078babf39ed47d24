"""Capturing: a real model's queries, keys, values and answers, on their way to a trace."""

from __future__ import annotations

from kvtune.capturing.hook import QueryHook
from kvtune.capturing.loop import Session
from kvtune.capturing.options import CaptureOptions
from kvtune.capturing.plan import CapturePlan
from kvtune.capturing.run import capture

__all__ = ["CaptureOptions", "CapturePlan", "QueryHook", "Session", "capture"]
