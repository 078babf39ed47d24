"""All measurements as one tidy Parquet table: one row per sample, timeline, turn, layer, head, metric, lag
and aggregation over the steps of the turn.

    sample, timeline, turn, layer   int32
    head                            int32, the model's own numbering; -1 for a metric of the whole layer
    heads                           query | kv | layer: what ``head`` counts
    metric                          see :mod:`kvtune.analysis.metrics` (also in the file's metadata)
    lag                             int32, steps apart (or steps in a working set); null where none applies
    aggregation                     mean | p10 | p50 | p90 | p95, over the steps (or pairs of steps)
    count                           how many values were aggregated (NaN left out)
    value                           float64
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kvtune.analysis.metrics import METRICS, Observations

QUANTILES = {"p10": 0.10, "p50": 0.50, "p90": 0.90, "p95": 0.95}
AGGREGATIONS = ("mean", *QUANTILES)

_TEXT = pa.dictionary(pa.int8(), pa.string())
SCHEMA = pa.schema(
    [
        *(
            pa.field(name, pa.int32(), nullable=False)
            for name in ("sample", "timeline", "turn", "layer", "head")
        ),
        pa.field("heads", _TEXT, nullable=False),
        pa.field("metric", _TEXT, nullable=False),
        pa.field("lag", pa.int32()),
        pa.field("aggregation", _TEXT, nullable=False),
        pa.field("count", pa.int64(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
    ],
    metadata={"kvtune.metrics": json.dumps({name: asdict(metric) for name, metric in METRICS.items()})},
)


class TidyTable:
    """Grows by the observations of one layer of one timeline at a time."""

    def __init__(self, kv_heads: Sequence[int], group: int) -> None:
        """``kv_heads``: the kv heads in the trace; their query heads are h·group … h·group + group - 1."""
        query_heads = [head * group + place for head in kv_heads for place in range(group)]
        self._heads = {"kv": np.array(kv_heads), "query": np.array(query_heads), "layer": np.array([-1])}
        self._batches: list[pa.RecordBatch] = []

    def add(self, sample: int, timeline: int, layer: int, observations: Sequence[Observations]) -> None:
        for seen in observations:
            turns = seen.turns.numpy()
            values = seen.values.double().numpy()
            for turn in np.unique(turns):
                count, table = aggregate(values[turns == turn])
                keep = np.repeat(count > 0, len(AGGREGATIONS))
                columns = self._columns(seen, count, table, keep)
                places = {"sample": sample, "timeline": timeline, "turn": int(turn), "layer": layer}
                rows = int(keep.sum())
                filled = {name: np.full(rows, value, np.int32) for name, value in places.items()}
                arrays = [pa.array(column) for column in filled.values()] + columns
                self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))

    def _columns(
        self,
        seen: Observations,
        count: NDArray[np.int64],
        table: NDArray[np.float64],
        keep: NDArray[np.bool_],
    ) -> list[pa.Array]:
        """The columns from ``head`` on, heads outermost; rows without a value are left out."""
        heads, rows, width = self._heads[seen.heads], int(keep.sum()), len(AGGREGATIONS)
        kinds = np.tile(np.arange(width, dtype=np.int8), len(heads))[keep]
        return [
            pa.array(np.repeat(heads, width)[keep].astype(np.int32)),
            _constant(seen.heads, rows),
            _constant(seen.metric, rows),
            pa.array([seen.lag] * rows, pa.int32()),
            pa.DictionaryArray.from_arrays(pa.array(kinds), pa.array(AGGREGATIONS)),
            pa.array(np.repeat(count, width)[keep]),
            pa.array(table.ravel()[keep]),
        ]

    def table(self) -> pa.Table:
        return pa.Table.from_batches(self._batches, SCHEMA).unify_dictionaries().combine_chunks()


def aggregate(values: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Count [heads] and aggregations [heads, 5] of values [n, heads] over n, NaN left out (all NaN: NaN)."""
    absent = np.isnan(values)
    count = len(values) - absent.sum(0)
    shares = list(QUANTILES.values())
    if not absent.any():
        return count, np.vstack([values.mean(0), np.quantile(values, shares, axis=0)]).T
    table = np.full((values.shape[1], len(AGGREGATIONS)), np.nan)
    for head in np.flatnonzero(count):
        column = values[~absent[:, head], head]
        table[head] = [column.mean(), *np.quantile(column, shares)]
    return count, table


def _constant(text: str, rows: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), pa.array([text]))
