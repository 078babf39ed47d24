"""Every way a trace can be harmed ends in one sentence that names the file (or the key) at fault."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_traces import header, random_vectors, write_trace

from kvtune.errors import TraceError
from kvtune.traces import TraceWriter, check_finite, open_trace
from kvtune.traces.integrity import digest, footer_checksum

KV, QUERIES, PROJECTION = (
    "kv/sample=0/layer=0.parquet",
    "queries/sample=1/layer=2.parquet",
    "o_proj/layer=0.parquet",
)
TABLES = ("samples.parquet", "segments.parquet", "tokens.parquet")
EVERY_KIND = (KV, QUERIES, PROJECTION, *TABLES)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / "t"
    write_trace(path, projections=True)
    return path


@pytest.fixture
def harmed(original, tmp_path):
    shutil.copytree(original, tmp_path / "t")
    return tmp_path / "t"


def read_all(path, verify):
    """Everything that the trace holds, as one list of tensors."""
    trace = open_trace(path, verify=verify)
    read = []
    for sample in range(trace.n_samples):
        for timeline in trace.timelines(sample):
            read.append(timeline.token_ids)
            for number in trace.layers:
                layer = timeline.layer(number)
                read += [
                    layer.keys,
                    layer.values,
                    layer.queries,
                    layer.query_positions,
                    layer.steps,
                    layer.turns,
                ]
                read.append(layer.o_proj)
    return read


def refused(path, verify=True):
    with pytest.raises(TraceError) as error:
        read_all(path, verify)
    assert error.value.exit_code == 2
    assert "\n" not in error.value.message
    return error.value.message


def edit_manifest(path, **changes):
    """Change fields and make the digest fit again."""
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_text(json.dumps({**manifest, "digest": digest(manifest)}))


def test_the_original_is_sound(original):
    assert len(read_all(original, verify=True)) == 2 * 3 * (1 + 2 * 7)


@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize("verify", [True, False])
def test_truncated(harmed, name, verify):
    data = (harmed / name).read_bytes()
    (harmed / name).write_bytes(data[:-20])
    message = refused(harmed, verify)
    assert str(harmed / name) in message
    assert "truncated" in message


@pytest.mark.parametrize("name", EVERY_KIND)
def test_missing(harmed, name):
    (harmed / name).unlink()
    message = refused(harmed, verify=False)
    assert str(harmed / name) in message
    assert "missing" in message


@pytest.mark.parametrize("name", EVERY_KIND)
def test_grown(harmed, name):
    with (harmed / name).open("ab") as file:
        file.write(b"more")
    assert f"'{harmed / name}' is damaged: too long" in refused(harmed, verify=False)


@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_bit_flipped(harmed, name, place):
    flip(harmed / name, place, bit=3)
    message = refused(harmed)
    assert str(harmed / name) in message
    assert "checksum" in message


def flip(file: Path, place: float, bit: int):
    data = bytearray(file.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1 << bit
    file.write_bytes(data)


@pytest.mark.parametrize("name", [KV, QUERIES, PROJECTION])
@pytest.mark.parametrize("back", [1, 8, 9, 60, 300])
def test_footers_are_verified_without_asking(harmed, name, back):
    """Arrow is not shown a footer with a flipped bit: some of them abort the process."""
    data = bytearray((harmed / name).read_bytes())
    data[-back] ^= 4
    (harmed / name).write_bytes(data)
    message = refused(harmed, verify=False)
    assert str(harmed / name) in message
    assert "footer" in message


def test_tables_are_verified_without_asking(harmed):
    flip(harmed / "segments.parquet", 0.5, bit=0)
    assert "segments.parquet" in refused(harmed, verify=False)


def test_vectors_are_verified_only_if_asked(harmed):
    """A flipped bit within a vector is another vector: only the checksum can tell."""
    file = harmed / KV
    needle = open_trace(harmed).timelines(0)[0].layer(0).values[0, 0].view(torch.uint8).numpy().tobytes()
    data = file.read_bytes()
    assert data.count(needle) == 1
    file.write_bytes(data.replace(needle, bytes([needle[0] ^ 1]) + needle[1:]))
    read_all(harmed, verify=False)
    assert str(file) in refused(harmed, verify=True)


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from([KV, QUERIES, PROJECTION]),
    place=st.floats(0, 1),
    bit=st.integers(0, 7),
    cut=st.booleans(),
)
def test_unverified_harm_ends_in_a_sentence_or_in_data(original, tmp_path_factory, name, place, bit, cut):
    """Whatever the file says, its reader raises ``TraceError`` or returns tensors; never anything else."""
    path = tmp_path_factory.mktemp("flipped") / "t"
    shutil.copytree(original, path)
    flip(path / name, 1 - (1 - place) / 4 if cut else place, bit)
    try:
        read = read_all(path, verify=False)
    except TraceError as error:
        assert name in error.message or "layer" in error.message
    else:
        assert len(read) == 2 * 3 * (1 + 2 * 7)
    finally:
        shutil.rmtree(path)


def test_each_file_is_verified_once(harmed, monkeypatch):
    checked = []
    from kvtune.traces import integrity

    original = integrity.checksum
    monkeypatch.setattr(integrity, "checksum", lambda file: checked.append(file.name) or original(file))
    read_all(harmed, verify=True)
    assert len(checked) == len(list(harmed.rglob("*.parquet")))


def test_swapped_neighbours(harmed):
    """Layer 2's file in the place of layer 0's, with a manifest that lists it: the file itself says no."""
    shutil.copy(harmed / "kv/sample=0/layer=2.parquet", harmed / KV)
    files = json.loads((harmed / "manifest.json").read_text())["files"]
    edit_manifest(harmed, files={**files, KV: files["kv/sample=0/layer=2.parquet"]})
    message = refused(harmed, verify=True)
    assert str(harmed / KV) in message
    assert "layer and sample" in message


@pytest.mark.parametrize("lost", ["last", "first"])
def test_a_file_that_lost_a_row_group(harmed, lost):
    file = pq.ParquetFile(harmed / KV)
    groups = list(range(file.num_row_groups))
    kept = groups[:-1] if lost == "last" else groups[1:]
    tables = [file.read_row_group(group) for group in kept]
    with pq.ParquetWriter(harmed / KV, file.schema_arrow, compression="none") as writer:
        for table in tables:
            writer.write_table(table)
    files = json.loads((harmed / "manifest.json").read_text())["files"]
    entry = {
        **files[KV],
        "bytes": (harmed / KV).stat().st_size,
        "footer_sha256": footer_checksum(harmed / KV),
    }
    edit_manifest(harmed, files={**files, KV: entry})
    message = refused(harmed, verify=False)
    assert str(harmed / KV) in message
    assert "lacks position" in message


def test_nothing_there(tmp_path):
    assert "no trace at" in refused(tmp_path / "nowhere")


def test_foreign_folders_and_files(tmp_path):
    assert "not a kvtune trace" in refused(tmp_path)
    (tmp_path / "file").write_text("x")
    assert "not a kvtune trace" in refused(tmp_path / "file")
    for text in ('{"name": "a web app"}', "[1, 2]", '"text"', "null"):
        (tmp_path / "manifest.json").write_text(text)
        message = refused(tmp_path)
        assert str(tmp_path / "manifest.json") in message
        assert "not a kvtune trace" in message


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe\x00", b'{"format": "kvtune-trace"', b"[" * 100_000])
def test_an_unreadable_manifest(harmed, data):
    (harmed / "manifest.json").write_bytes(data)
    message = refused(harmed)
    assert f"'{harmed / 'manifest.json'}' is damaged" in message


def test_a_newer_format(harmed):
    edit_manifest(harmed, format_version=2)
    with pytest.raises(TraceError, match="trace format 2; this kvtune reads formats up to 1") as error:
        open_trace(harmed)
    assert "manifest.json" in error.value.message
    assert "upgrade" in error.value.hint


@pytest.mark.parametrize("version", [0, -1, "1", None, 1.5, True])
def test_a_format_version_that_never_was(harmed, version):
    edit_manifest(harmed, format_version=version)
    assert "manifest.json" in refused(harmed)


@pytest.mark.parametrize("key", ["files", "geometry", "layers", "complete", "digest"])
def test_a_manifest_that_lacks_something(harmed, key):
    manifest = json.loads((harmed / "manifest.json").read_text())
    del manifest[key]
    (harmed / "manifest.json").write_text(json.dumps(manifest))
    assert f"it lacks {key}" in refused(harmed)


def test_an_edited_manifest(harmed):
    text = (harmed / "manifest.json").read_text()
    (harmed / "manifest.json").write_text(text.replace('"seed": 7', '"seed": 8'))
    assert "digest" in refused(harmed)


def test_a_manifest_with_a_number_that_json_does_not_know(harmed):
    text = (harmed / "manifest.json").read_text()
    (harmed / "manifest.json").write_text(text.replace('"seed": 7', '"seed": NaN'))
    assert "digest" in refused(harmed)


def test_every_flipped_bit_of_the_manifest_is_noticed(harmed):
    data = (harmed / "manifest.json").read_bytes()
    for at in range(0, len(data), 37):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 7
        (harmed / "manifest.json").write_bytes(flipped)
        if json_equal(flipped, data):
            continue
        assert "manifest.json" in refused(harmed)


def json_equal(one: bytes, other: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_key_that_is_not_finite(tmp_path, value, dtype):
    writer = TraceWriter(tmp_path / "t", header(dtype=dtype, layers=[2], kv_heads=[1]))
    keys = random_vectors(1, 9, 8, seed=0, dtype=dtype)
    keys[0, 5, 3] = value
    keys[0, 7, 0] = float("nan")
    with writer.sample(0) as sample:
        sample.segment(kind="context", request=-1, turn=-1, parent=-1, start=0, token_ids=range(9))
        sample.keys_values(2, 0, keys, random_vectors(1, 9, 6, seed=1, dtype=dtype))
    writer.finish()
    layer = open_trace(tmp_path / "t").timelines(0)[0].layer(2)
    kind = "NaN" if math.isnan(value) else "infinite"
    with pytest.raises(TraceError, match=f"key of sample 0, layer 2, head 1, position 5 is {kind}"):
        _ = layer.keys
    assert layer.values.shape == (1, 9, 6)


@settings(max_examples=50, deadline=None)
@given(
    bad=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 3)), max_size=4),
    value=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
)
def test_check_finite_names_the_first(bad, value):
    vectors = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(0))
    for place in bad:
        vectors[place] = value
    where = {"sample": 4, "layer": 5, "heads": [1, 3, 8], "positions": torch.arange(10, 17)}
    if not bad:
        check_finite(vectors, **where)
        return
    head, row, _ = min(bad)
    with pytest.raises(
        TraceError, match=f"value of sample 4, layer 5, head {[1, 3, 8][head]}, position {row + 10} "
    ):
        check_finite(vectors, **where, what="value")


def test_large_but_finite_keys_pass():
    vectors = torch.full((1, 4, 8), torch.finfo(torch.float16).max, dtype=torch.float16)
    check_finite(vectors, sample=0, layer=0, heads=[0], positions=torch.arange(4))
    check_finite(vectors[:, :0], sample=0, layer=0, heads=[0], positions=torch.arange(0))
