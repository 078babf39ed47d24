"""What is written is what is read, bit for bit, in the layout that the format promises."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny_traces import GEOMETRY, header, random_vectors, write_sample, write_trace

import kvtune
from kvtune.errors import InputError
from kvtune.traces import TraceWriter, files, open_trace, sample_writer


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_everything_comes_back(tmp_path, dtype):
    put = write_trace(tmp_path / "t", dtype=dtype, projections=True)
    trace = kvtune.open_trace(tmp_path / "t", verify=True)
    for sample in range(trace.n_samples):
        for timeline in trace.timelines(sample):
            path = [s.segment for s in timeline.segments]
            for number in trace.layers:
                layer = timeline.layer(number)
                for name in ("keys", "values"):
                    wanted = torch.cat([put[sample, number, s, name] for s in path], 1)
                    assert torch.equal(bits(getattr(layer, name)), bits(wanted))
                asked = [
                    put[sample, number, s, "queries"] for s in path if (sample, number, s, "queries") in put
                ]
                assert torch.equal(bits(layer.queries), bits(torch.cat(asked)))
                assert layer.keys.dtype == trace.dtype
                assert torch.equal(layer.o_proj, put[number, "o_proj"])


def test_every_bf16_pattern_survives(tmp_path):
    """pytorch#110285: bfloat16 tensors have no numpy form; all 65,536 patterns must come through as bits."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    with pytest.raises(TypeError):
        patterns.numpy()
    geometry = {**GEOMETRY.to_dict(), "head_dim": 128, "value_dim": 256}
    writer = TraceWriter(tmp_path / "t", header(geometry=geometry, layers=[0], kv_heads=[0]))
    values, queries = patterns.view(1, 256, 256), patterns.view(256, 2, 128)
    with writer.sample(0) as sample:
        sample.segment(kind="context", request=-1, turn=-1, parent=-1, start=0, token_ids=range(256))
        sample.keys_values(0, 0, torch.zeros(1, 256, 128, dtype=torch.bfloat16), values)
        sample.queries(0, 0, range(256), [-1] * 256, 0, queries)
    writer.finish()
    layer = open_trace(tmp_path / "t").timelines(0)[0].layer(0)
    assert torch.equal(layer.values.view(torch.int16), values.view(torch.int16))
    assert torch.equal(layer.queries.view(torch.int16), queries.view(torch.int16))


def test_rows_and_metadata_reach_the_user(tmp_path):
    write_trace(tmp_path / "t")
    trace = open_trace(tmp_path / "t")
    assert (trace.model, trace.fingerprint, trace.dtype) == ("tiny", "0123", torch.bfloat16)
    assert trace.geometry == GEOMETRY
    assert (trace.n_samples, trace.layers, trace.kv_heads, trace.has_values) == (2, (0, 2), (0, 1), True)
    assert trace.manifest["workload"] == {"task": "tiny", "samples": 2}
    assert trace.manifest["complete"] is True
    assert [(r.sample, r.request, r.turn) for r in trace.samples] == [
        (s, r, t) for s in (0, 1) for r in (0, 1) for t in (0, 1)
    ]
    first = trace.samples[0]
    assert (first.task, first.reference, first.generated, first.score) == (
        "tiny",
        "reference",
        "generated",
        None,
    )
    assert trace.samples[1].score == 1.0
    kinds = [s.kind for s in trace.segments(1)]
    assert kinds == ["context", "question", "generated", "fed_back", *["question", "generated"] * 3]
    assert {s.sample for s in trace.segments(1)} == {1}


def test_any_text_can_be_recorded(tmp_path):
    texts = ["", "\ud800 alone", "\x00", "e\u0301 \U0001f600", "line\nline"]
    writer = TraceWriter(tmp_path / "t", header(layers=[0]))
    with writer.sample(0) as sample:
        sample.segment(kind="context", request=-1, turn=-1, parent=-1, start=0, token_ids=[])
        for turn, text in enumerate(texts):
            sample.record(0, turn, "tiny", text, text, 0.5)
    writer.finish()
    records = open_trace(tmp_path / "t").samples
    assert [r.generated for r in records] == ["", "? alone", *texts[2:]]
    assert [r.reference for r in records] == [r.generated for r in records]


def test_the_golden_branches(tmp_path):
    write_trace(tmp_path / "t")
    replaced, main, other = open_trace(tmp_path / "t").timelines(0)
    context = list(range(100, 120))
    assert replaced.token_ids.tolist() == [*context, 1, 2, 3, 4, 5, 6, 7]
    assert main.token_ids.tolist() == [*context, 1, 2, 3, 8, 9, 1, 2, 3, 4, 5, 6, 7]
    assert other.token_ids.tolist() == [*context, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7]
    assert main.token_ids.dtype == torch.int64
    assert [t.request for t in (replaced, main, other)] == [0, 0, 1]
    assert [t.turns for t in (replaced, main, other)] == [(0,), (1,), (0, 1)]
    assert [t.index for t in (replaced, main, other)] == [0, 1, 2]
    assert [t.prompt_length for t in (replaced, main, other)] == [23, 23, 23]
    layer = main.layer(2)
    assert layer.query_positions.tolist() == [*range(15, 20), 20, 21, 22, 25, 26, 27, *range(28, 32)]
    assert layer.phases == ["prompt"] * 11 + ["decode"] * 4
    assert layer.steps.tolist() == [-1] * 11 + [0, 1, 2, 3]
    assert layer.turns.tolist() == [0] * 8 + [1] * 7
    assert layer.decode.tolist() == [False] * 11 + [True] * 4
    assert layer.key_positions.tolist() == list(range(32))


def test_layer_info_carries_what_the_header_knows(tmp_path):
    sinks = {2: [0.1, 0.2, 0.3, 0.4]}
    write_trace(tmp_path / "t", kv_heads=[1], sinks=sinks, alibi=[1.0, 2.0, 3.0, 4.0])
    timeline = open_trace(tmp_path / "t").timelines(0)[0]
    info = timeline.layer(2).info
    assert (info.n_heads, info.n_kv_heads, info.group) == (2, 1, 2)
    assert (info.sinks, info.alibi, info.softcap) == ((0.3, 0.4), (3.0, 4.0), 30.0)
    assert timeline.layer(0).info.sinks is None


def test_subset_of_heads_keeps_the_projection_in_step(tmp_path):
    put = write_trace(tmp_path / "t", kv_heads=[1], projections=True)
    layer = open_trace(tmp_path / "t").timelines(0)[0].layer(0)
    assert layer.keys.shape == (1, 27, 8)
    assert layer.queries.shape == (12, 2, 8)
    assert torch.equal(layer.o_proj, put[0, "o_proj"][:, 12:])


def test_without_values_or_projection(tmp_path):
    write_trace(tmp_path / "t", values=False)
    trace = open_trace(tmp_path / "t")
    layer = trace.timelines(0)[0].layer(0)
    assert not trace.has_values
    assert layer.keys.shape == (2, 27, 8)
    assert layer.o_proj is None
    with pytest.raises(InputError, match="no values"):
        _ = layer.values


def test_what_is_not_there_is_refused_by_name(tmp_path):
    write_trace(tmp_path / "t")
    trace = open_trace(tmp_path / "t")
    with pytest.raises(InputError, match="no layer 1") as refused:
        trace.timelines(0)[0].layer(1)
    assert "0, 2" in refused.value.hint
    for sample in (-1, 2):
        with pytest.raises(InputError, match=f"no sample {sample}"):
            trace.timelines(sample)


def test_storage_is_as_promised(tmp_path):
    """Fixed-size binaries with dtype and dimension, neither encoded nor compressed nor summarised."""
    write_trace(tmp_path / "t", projections=True)
    for name, dim in (("kv/sample=0", 8), ("queries/sample=0", 8), ("o_proj", 24)):
        file = pq.ParquetFile(tmp_path / "t" / name / "layer=2.parquet")
        metadata = file.metadata
        for column, field in enumerate(file.schema_arrow):
            for group in range(metadata.num_row_groups):
                chunk = metadata.row_group(group).column(column)
                assert chunk.compression == "UNCOMPRESSED"
                if pa.types.is_fixed_size_binary(field.type):
                    assert not chunk.has_dictionary_page
                    assert chunk.statistics is None
                    assert set(chunk.encodings) <= {"PLAIN", "RLE"}
            if field.name in ("key", "query", "weight"):
                assert field.metadata == {b"dtype": b"bfloat16", b"dimension": str(dim).encode()}
                assert field.type == pa.binary(2 * dim)


def test_row_groups_are_segment_by_head(tmp_path):
    write_trace(tmp_path / "t")
    table = pq.ParquetFile(tmp_path / "t/kv/sample=0/layer=0.parquet")
    seen = []
    for group in range(table.num_row_groups):
        rows = table.read_row_group(group, columns=["segment", "kv_head", "position"]).to_pylist()
        assert len({(row["segment"], row["kv_head"]) for row in rows}) == 1
        seen += [(row["segment"], row["kv_head"], row["position"]) for row in rows]
    assert seen == sorted(seen)
    assert table.num_row_groups == 2 * len(open_trace(tmp_path / "t").segments(0))


def test_large_groups_are_split_and_joined_again(tmp_path, monkeypatch):
    whole = write_trace(tmp_path / "whole")
    monkeypatch.setattr(sample_writer, "ROW_GROUP_BYTES", 3 * (8 + 6) * 2)
    monkeypatch.setattr(sample_writer, "QUERY_GROUP_BYTES", 3 * 8 * 2)
    write_trace(tmp_path / "split")
    file = pq.ParquetFile(tmp_path / "split/kv/sample=0/layer=0.parquet")
    assert max(file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)) == 3
    layer = open_trace(tmp_path / "split").timelines(0)[0].layer(0)
    assert torch.equal(layer.keys, torch.cat([whole[0, 0, s, "keys"] for s in (0, 1, 2)], 1))
    assert torch.equal(layer.queries, torch.cat([whole[0, 0, s, "queries"] for s in (0, 1, 2)]))


def test_vectors_are_read_raw_or_decoded_to_the_same_bits(tmp_path, monkeypatch):
    """One page per row group is read as plain bytes; several, as some Arrow versions write, are decoded."""
    decoded = []
    decode = files.VectorFile._decode_into
    monkeypatch.setattr(
        files.VectorFile, "_decode_into", lambda *args: decoded.append(args[2:]) or decode(*args)
    )

    def read(path):
        layer = open_trace(path).timelines(0)[0].layer(0)
        return torch.cat(
            [bits(layer.keys).flatten(), bits(layer.values).flatten(), bits(layer.queries).flatten()]
        )

    write_trace(tmp_path / "one")
    raw = read(tmp_path / "one")
    assert not decoded
    monkeypatch.setattr(files, "_ONE_PAGE", {"data_page_size": 32, "write_batch_size": 2})
    write_trace(tmp_path / "many")
    assert torch.equal(read(tmp_path / "many"), raw)
    assert {name for _, name in decoded} == {"key", "value", "query"}


def test_memory_for_large_reads():
    """Huge pages or not, it is an ordinary writable tensor that outlives the file."""
    for shape in [(3, 5), (2, 1 << 20, 3)]:
        tensor = files.empty(shape, torch.bfloat16)
        assert tensor.shape == shape
        tensor[:] = 1.5
        assert float(tensor[-1].float().mean()) == 1.5
        assert tensor.is_contiguous()


def test_queries_may_come_in_any_number_of_calls(tmp_path, monkeypatch):
    """Row groups of five positions, however the calls are cut; the caller may reuse its memory at once."""
    monkeypatch.setattr(sample_writer, "QUERY_GROUP_BYTES", 5 * 4 * 8 * 2)
    queries = random_vectors(12, 4, 8, seed=1)

    def write(path, cuts):
        writer = TraceWriter(path, header(layers=[0]))
        buffer = torch.empty_like(queries)
        with writer.sample(0) as sample:
            sample.segment(kind="context", request=-1, turn=-1, parent=-1, start=0, token_ids=range(12))
            sample.keys_values(0, 0, random_vectors(2, 12, 8, seed=2), random_vectors(2, 12, 6, seed=3))
            for a, b in zip([0, *cuts], [*cuts, 12]):
                given = buffer[: b - a].copy_(queries[a:b])
                sample.queries(0, 0, torch.arange(a, b), torch.full((b - a,), -1), 0, given)
                given.fill_(float("nan"))
        return writer.finish()["files"]

    assert write(tmp_path / "one", []) == write(tmp_path / "many", [1, 2, 7])
    assert torch.equal(open_trace(tmp_path / "many").timelines(0)[0].layer(0).queries, queries)
    metadata = pq.read_metadata(tmp_path / "many/queries/sample=0/layer=0.parquet")
    assert [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)] == [20, 20, 8]


def test_folders_may_look_like_partitions(tmp_path):
    write_trace(tmp_path / "seed=3")
    assert len(open_trace(tmp_path / "seed=3").samples) == 8


def test_an_empty_segment_is_a_segment(tmp_path):
    writer = TraceWriter(tmp_path / "t", header(layers=[0]))
    with writer.sample(0) as sample:
        context = sample.segment(kind="context", request=-1, turn=-1, parent=-1, start=0, token_ids=[1, 2])
        sample.segment(kind="generated", request=0, turn=0, parent=context, start=2, token_ids=[])
        sample.keys_values(0, context, random_vectors(2, 2, 8, seed=2), random_vectors(2, 2, 6, seed=3))
    writer.finish()
    (timeline,) = open_trace(tmp_path / "t").timelines(0)
    layer = timeline.layer(0)
    assert (timeline.token_ids.tolist(), timeline.prompt_length) == ([1, 2], 2)
    assert layer.keys.shape == (2, 2, 8)
    assert layer.queries.shape == (0, 4, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": []}, "layers"),
        ({"layers": [0, 3]}, "layers"),
        ({"kv_heads": [1, 0]}, "kv_heads"),
        ({"dtype": "int8"}, "dtype"),
        ({"complete": True}, "complete"),
        ({"seed": float("nan")}, "JSON"),
    ],
)
def test_headers_without_sense(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        TraceWriter(tmp_path / "t", header(**change))
    assert not (tmp_path / "t").exists()


def wrong_parent(sample):
    sample.segment(kind="question", request=0, turn=0, parent=9, start=0, token_ids=[1])


def wrong_start(sample):
    sample.segment(kind="question", request=0, turn=0, parent=0, start=1, token_ids=[1])


def wrong_kind(sample):
    sample.segment(kind="answer", request=0, turn=0, parent=0, start=2, token_ids=[1])


def wrong_shape(sample):
    sample.keys_values(0, 0, random_vectors(2, 3, 8, seed=0), random_vectors(2, 2, 6, seed=0))


def wrong_dtype(sample):
    sample.keys_values(
        0, 0, random_vectors(2, 2, 8, seed=0, dtype="float16"), random_vectors(2, 2, 6, seed=0)
    )


def lacking_values(sample):
    sample.keys_values(0, 0, random_vectors(2, 2, 8, seed=0), None)


def keys_twice(sample):
    for _ in range(2):
        sample.keys_values(0, 0, random_vectors(2, 2, 8, seed=0), random_vectors(2, 2, 6, seed=0))


def no_keys(sample):
    sample.queries(0, 0, [1], [-1], 0, random_vectors(1, 4, 8, seed=0))


def query_outside(sample):
    sample.queries(0, 0, [2], [-1], 0, random_vectors(1, 4, 8, seed=0))


def queries_descending(sample):
    sample.queries(0, 0, [1], [-1], 0, random_vectors(1, 4, 8, seed=0))
    sample.queries(0, 0, [0], [-1], 0, random_vectors(1, 4, 8, seed=0))


MISUSES = [
    (wrong_parent, "hang off"),
    (wrong_start, "must start at 2"),
    (wrong_kind, "kind"),
    (wrong_shape, r"keys must be \[2, 2, 8\]"),
    (wrong_dtype, "float16"),
    (lacking_values, "values"),
    (keys_twice, "ascending segment"),
    (no_keys, r"lacks the keys of segments \[0\]"),
    (query_outside, "ascend within"),
    (queries_descending, "ascend within"),
]


@pytest.mark.parametrize(("misuse", "message"), MISUSES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_sample_that_does_not_fit_together_is_not_kept(tmp_path, misuse, message):
    writer = TraceWriter(tmp_path / "t", header(layers=[0]))
    with pytest.raises(ValueError, match=message), writer.sample(0) as sample:
        sample.segment(kind="context", request=-1, turn=-1, parent=-1, start=0, token_ids=[1, 2])
        misuse(sample)
    assert writer.completed == set()
    with writer.sample(0) as sample:
        write_sample(sample, header(layers=[0]), seed=0)
    assert writer.completed == {0}


def test_samples_are_written_once_and_without_gaps(tmp_path):
    writer = TraceWriter(tmp_path / "t", header())
    with writer.sample(1) as sample:
        write_sample(sample, header(), seed=1)
    with pytest.raises(ValueError, match="there already"), writer.sample(1):
        pass
    with pytest.raises(ValueError, match="expected"):
        writer.finish()


def test_a_projection_of_the_wrong_shape(tmp_path):
    writer = TraceWriter(tmp_path / "t", header())
    with pytest.raises(ValueError, match=r"must be \[hidden, 24\] bfloat16"):
        writer.o_proj(0, torch.zeros(5, 23, dtype=torch.bfloat16))


def test_a_layer_moves_to_a_device_whole(tmp_path):
    writer = TraceWriter(tmp_path / "t", header())
    with writer.sample(0) as sample:
        write_sample(sample, header(), seed=0)
    writer.finish()
    layer = open_trace(tmp_path / "t").timelines(0)[0].layer(2)
    assert layer.to("cpu") is layer
    moved = layer.to("meta")
    for name in ("keys", "values", "key_positions", "queries", "query_positions", "turns", "steps"):
        assert getattr(moved, name).device.type == "meta", name
        assert getattr(moved, name).shape == getattr(layer, name).shape, name
