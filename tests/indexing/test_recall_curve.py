"""The recall–cost curve against a slow count."""

from __future__ import annotations

import pytest
import torch

from kvtune import open_trace
from kvtune.clustering.key_index import IndexSpec
from kvtune.errors import InputError
from kvtune.indexing import build_index, open_index, recall_curve
from kvtune.indexing.building import build_one
from kvtune.indexing.curve import default_sweep

pytest.importorskip("faiss")


@pytest.fixture
def trace(trace_path):
    return open_trace(trace_path)


def slow_recall(trace, spec, layers):
    """Share of each query head's exact top-100 prompt keys that its own search finds, and bytes read."""
    recalls, scanned = [], []
    for sample in (0, 1):
        for timeline in trace.timelines(sample):
            for number in layers:
                layer = timeline.layer(number)
                for q_head in range(4):
                    keys = layer.keys[q_head // 2, :300]
                    index = build_one(keys, spec, torch.device("cpu"), 0)
                    for query in layer.queries[layer.decode][:, q_head]:
                        exact = torch.argsort(keys.double() @ query.double(), descending=True)[:100]
                        found = index.search(query[None], 100)
                        recalls.append(len(set(exact.tolist()) & set(found.ids[0].tolist())) / 100)
                        scanned.append(int(found.scan_bytes[0]))
    return sum(recalls) / len(recalls), sum(scanned) / len(scanned)


@pytest.mark.parametrize(
    ("kind", "parameters", "name", "values"),
    [
        ("ivf", {"nlist": 10}, "nprobe", [1, 4]),
        ("kmeans", {"clusters": 20}, "nprobe", [2, 7]),
        ("hnsw", {"M": 8}, "efSearch", [100, 150]),
        ("hnsw", {"efSearch": 120}, "M", [4, 16]),
        ("pq", {}, "bits", [4, 6]),
    ],
)
def test_curve_equals_a_slow_count(kind, parameters, name, values, trace):
    spec = IndexSpec.of(kind, parameters)
    document = recall_curve(trace, spec, (name, values), layers=[0], device="cpu")
    assert document["queries"] == 2 * 4 * 6 and document["keys"] == 300 and document["k"] == 100
    assert document["exact"]["scan_bytes"] == 300 * 16 * 2
    assert [row["value"] for row in document["curve"]] == values
    for row in document["curve"]:
        recall, scanned = slow_recall(trace, spec.changed({name: row["value"]}), [0])
        # Keys of equal score in float32 count as found; the slow count orders them.
        assert row["recall_at_100"] == pytest.approx(recall, abs=0.002)
        assert row["scan_bytes"] == pytest.approx(scanned)
        assert row["parameter"] == name and row["milliseconds"] > 0


def test_recall_and_cost_rise_with_the_effort_and_end_exact(trace):
    curve = recall_curve(trace, IndexSpec.of("ivf"))["curve"]
    assert [row["value"] for row in curve] == [1, 2, 4, 8, 16, 17]
    recalls = [row["recall_at_100"] for row in curve]
    scans = [row["scan_bytes"] for row in curve]
    assert recalls == sorted(recalls) and scans == sorted(scans)
    assert recalls[0] < 0.7 and recalls[-1] == 1.0


def test_flat_is_exact_and_has_nothing_to_sweep(trace):
    document = recall_curve(trace, IndexSpec.of("flat"), layers=[1], samples=[0])
    (row,) = document["curve"]
    assert row["parameter"] is None and row["value"] is None
    assert row["recall_at_100"] == 1.0 and row["scan_bytes"] == document["exact"]["scan_bytes"]


def test_a_saved_index_gives_the_same_curve(trace, tmp_path):
    spec = IndexSpec.of("ivf", {"nlist": 10})
    build_index(trace, tmp_path / "idx", spec, layers=[1], samples=[0])
    stored = recall_curve(trace, stored=open_index(tmp_path / "idx"))
    fresh = recall_curve(trace, spec, layers=[1], samples=[0])
    assert stored["queries"] == fresh["queries"] == 24 and stored["build_seconds"] == 0
    for mine, theirs in zip(stored["curve"], fresh["curve"], strict=True):
        assert {**mine, "milliseconds": 0} == {**theirs, "milliseconds": 0}


def test_a_saved_index_of_codes_is_measured_as_it_is(trace, tmp_path):
    build_index(trace, tmp_path / "idx", IndexSpec.of("pq", {"bits": 4}), layers=[1])
    document = recall_curve(trace, stored=open_index(tmp_path / "idx"))
    assert [row["value"] for row in document["curve"]] == [None]
    with pytest.raises(InputError, match="bits is fixed in a saved index"):
        recall_curve(trace, None, ("bits", [4]), stored=open_index(tmp_path / "idx"))


def test_an_index_of_another_trace_is_refused(trace, make_trace, tmp_path):
    other = open_trace(make_trace(tmp_path / "other.trace", seed=50))
    build_index(other, tmp_path / "idx", IndexSpec.of("flat"))
    with pytest.raises(InputError, match="was not built from this trace"):
        recall_curve(trace, stored=open_index(tmp_path / "idx"))


def test_a_trace_without_decode_queries_is_refused(make_trace, tmp_path):
    silent = open_trace(make_trace(tmp_path / "silent.trace", decode=False))
    with pytest.raises(InputError, match="holds no decode queries"):
        recall_curve(silent, IndexSpec.of("flat"))


def test_unknown_parameters_are_refused(trace):
    with pytest.raises(InputError, match="unknown parameter of index kind 'ivf' 'nprobes'"):
        recall_curve(trace, IndexSpec.of("ivf"), ("nprobes", [1]))
    with pytest.raises(InputError, match="has no parameters, so no 'nprobe'"):
        recall_curve(trace, IndexSpec.of("flat"), ("nprobe", [1]))


def test_default_sweeps_fit_the_keys():
    assert default_sweep(IndexSpec.of("ivf", {"nlist": 4}), 300, 16) == ("nprobe", [1, 2, 4])
    assert default_sweep(IndexSpec.of("kmeans"), 300, 16) == ("nprobe", [1, 2, 4, 8, 16, 19])
    assert default_sweep(IndexSpec.of("pq"), 100, 16) == ("bits", [4, 6])
    assert default_sweep(IndexSpec.of("hnsw"), 100, 16) == ("efSearch", [100, 200, 400, 800])
