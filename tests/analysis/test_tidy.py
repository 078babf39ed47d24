from __future__ import annotations

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from kvtune.analysis.figures import head_means
from kvtune.analysis.metrics import METRICS, Observations
from kvtune.analysis.tidy import AGGREGATIONS, SCHEMA, TidyTable, aggregate


def slow_aggregate(column):
    known = sorted(value for value in column if not math.isnan(value))

    def quantile(share):
        place = share * (len(known) - 1)
        low = math.floor(place)
        high = min(low + 1, len(known) - 1)
        return known[low] + (place - low) * (known[high] - known[low])

    return [sum(known) / len(known), *(quantile(share) for share in (0.1, 0.5, 0.9, 0.95))]


@pytest.mark.parametrize("gaps", [False, True])
def test_aggregation_equals_the_slow_reference(gaps):
    values = np.random.default_rng(0).normal(size=(13, 3))
    if gaps:
        values[[1, 5], 0] = math.nan
    count, table = aggregate(values)
    assert count.tolist() == [11 if gaps else 13, 13, 13]
    for head in range(3):
        assert table[head].tolist() == pytest.approx(slow_aggregate(values[:, head].tolist()))


def test_one_row_per_turn_head_and_aggregation_under_the_models_head_numbers(tmp_path):
    tidy = TidyTable(kv_heads=[1, 3], group=2)
    turns = torch.tensor([0, 0, 4])
    tidy.add(5, 1, 7, [
        Observations("overlap", torch.tensor([[0.0] * 4, [1.0] * 4, [0.25] * 4]), turns, lag=2),
        Observations("read_bytes", torch.tensor([[8, 16]] * 3), turns),
        Observations("visible_tokens", torch.tensor([[3], [4], [9]]), turns),
    ])  # fmt: skip
    pq.write_table(tidy.table(), tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    rows = table.to_pylist()
    assert len(rows) == 2 * (4 + 2 + 1) * len(AGGREGATIONS)
    assert table.schema.names == SCHEMA.names
    assert json.loads(table.schema.metadata[b"kvtune.metrics"]).keys() == METRICS.keys()
    found = {(r["metric"], r["turn"], r["head"], r["aggregation"]): r for r in rows}
    row = found["overlap", 0, 7, "mean"]
    assert (row["sample"], row["timeline"], row["layer"], row["lag"]) == (5, 1, 7, 2)
    assert (row["heads"], row["count"], row["value"]) == ("query", 2, 0.5)
    assert {r["head"] for r in rows if r["heads"] == "query"} == {2, 3, 6, 7}
    assert {r["head"] for r in rows if r["heads"] == "kv"} == {1, 3}
    assert found["visible_tokens", 0, -1, "p50"]["value"] == 3.5
    assert found["read_bytes", 4, 3, "p95"]["lag"] is None


def test_heads_without_a_value_leave_no_row():
    tidy = TidyTable([0], 2)
    values = torch.tensor([[math.nan, 1.0], [math.nan, 3.0]])
    tidy.add(0, 0, 0, [Observations("overlap", values, torch.tensor([0, 0]), lag=1)])
    assert {row["head"] for row in tidy.table().to_pylist()} == {1}


def test_an_empty_table_keeps_its_schema():
    assert TidyTable([0], 1).table().schema.names == SCHEMA.names


def test_head_means_weigh_by_count():
    tidy = TidyTable([0], 2)
    tidy.add(0, 0, 3, [Observations("error", torch.tensor([[1.0, 2.0]]), torch.tensor([0]))])
    tidy.add(1, 0, 3, [Observations("error", torch.tensor([[4.0, 0.0]] * 2), torch.tensor([0, 0]))])
    tidy.add(1, 0, 8, [Observations("error", torch.tensor([[9.0, math.nan]]), torch.tensor([0]))])
    heads, layers, means = head_means(tidy.table(), "error")
    assert (heads, layers) == ([0, 1], [3, 8])
    assert means[0].tolist() == pytest.approx([3.0, 2 / 3])
    assert means[1, 0] == 9.0
    assert math.isnan(means[1, 1])
