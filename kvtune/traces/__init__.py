"""Traces: real queries, keys and values of a model on a workload, written once and read many times."""

from __future__ import annotations

from kvtune.traces.integrity import check_finite
from kvtune.traces.layer import TimelineLayer
from kvtune.traces.reader import Trace, open_trace
from kvtune.traces.sample_writer import SampleWriter
from kvtune.traces.schema import SampleRecord, Segment
from kvtune.traces.timeline import Timeline
from kvtune.traces.writer import TraceWriter

__all__ = [
    "SampleRecord",
    "SampleWriter",
    "Segment",
    "Timeline",
    "TimelineLayer",
    "Trace",
    "TraceWriter",
    "check_finite",
    "open_trace",
]
