"""Index folders: whole or absent, verified, and the same answers after loading."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kvtune import open_trace
from kvtune.clustering.key_index import KINDS, IndexSpec
from kvtune.errors import InputError
from kvtune.indexing import build_index, open_index
from kvtune.indexing.building import build_one
from kvtune.traces.integrity import digest

pytest.importorskip("faiss")
SMALL = {"ivf": {"nlist": 10}, "pq": {"bits": 4}, "hnsw": {"M": 8}}


def spec(kind="ivf"):
    return IndexSpec.of(kind, SMALL.get(kind, {}))


@pytest.fixture
def trace(trace_path):
    return open_trace(trace_path)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_saved_index_answers_as_one_in_memory(kind, trace, tmp_path):
    summary = build_index(trace, tmp_path / "idx", spec(kind), device="cpu")
    folder = open_index(tmp_path / "idx")
    folder.verify()
    assert sorted(folder.entries) == [(s, 0, layer, h) for s in (0, 1) for layer in (0, 1) for h in (0, 1)]
    assert summary["indexes"] == 8 and summary["keys"] == 8 * 300
    queries = torch.randn(5, 16, generator=torch.Generator().manual_seed(3))
    for unit in [(0, 0, 0, 0), (1, 0, 1, 1)]:
        timeline = next(iter(trace.timelines(unit[0])))
        keys = timeline.layer(unit[2]).keys[unit[3], :300]
        mine = build_one(keys, spec(kind), torch.device("cpu"), 0).search(queries, 50)
        theirs = folder.load(unit).search(queries, 50)
        assert np.array_equal(mine.ids, theirs.ids) and np.array_equal(mine.scan_bytes, theirs.scan_bytes)
    assert summary["structure_bytes"] == sum(folder.load(u).structure_bytes() for u in folder.entries)


def test_chosen_layers_and_samples_only(trace, tmp_path):
    build_index(trace, tmp_path / "idx", spec(), layers=[1], samples=[1], timelines=[0])
    folder = open_index(tmp_path / "idx")
    assert sorted(folder.entries) == [(1, 0, 1, 0), (1, 0, 1, 1)]
    with pytest.raises(InputError, match="has no index of sample 0, timeline 0, layer 1, kv head 0"):
        folder.load((0, 0, 1, 0))


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ({"layers": [2]}, "layer 2 has a sliding window"),
        ({"layers": [7]}, "the trace holds no layer 7"),
        ({"samples": [2]}, "the trace holds no sample 2"),
        ({"timelines": [5]}, "the trace holds no timeline 5"),
    ],
)
def test_choices_that_the_trace_lacks_are_refused(choice, sentence, trace, tmp_path):
    with pytest.raises(InputError, match=sentence):
        build_index(trace, tmp_path / "idx", spec(), **choice)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_of_windowed_layers_has_nothing_to_index(make_trace, tmp_path):
    windowed = open_trace(make_trace(tmp_path / "w.trace", layers=(2,)))
    with pytest.raises(InputError, match="every layer of this trace has a sliding window"):
        build_index(windowed, tmp_path / "idx", spec())


def test_nothing_is_left_when_keys_do_not_fit(trace, tmp_path):
    with pytest.raises(InputError, match="nlist=301 of index kind 'ivf' needs at least 301 keys"):
        build_index(trace, tmp_path / "idx", IndexSpec.of("ivf", {"nlist": 301}))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_replaced_silently(trace, tmp_path):
    folder = tmp_path / "idx"
    build_index(trace, folder, spec(), layers=[0])
    before = (folder / "manifest.json").read_bytes()
    with pytest.raises(InputError, match="exists already"):
        build_index(trace, folder, spec("flat"), layers=[0])
    with pytest.raises(InputError, match="needs at least 999"):
        build_index(trace, folder, IndexSpec.of("ivf", {"nlist": 999}), overwrite=True)
    assert (folder / "manifest.json").read_bytes() == before
    build_index(trace, folder, spec("flat"), layers=[0], overwrite=True)
    assert open_index(folder).spec.kind == "flat"
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_is_no_index_is_never_replaced(trace, tmp_path):
    folder = tmp_path / "idx"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="is not a kvtune index: it is not replaced"):
        build_index(trace, folder, spec(), overwrite=True)
    assert (folder / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["ivf", "kmeans"])
@pytest.mark.parametrize("harm", ["flip", "cut", "lose"])
def test_a_corrupt_file_is_named(kind, harm, trace, tmp_path):
    build_index(trace, tmp_path / "idx", spec(kind), layers=[0])
    folder = open_index(tmp_path / "idx")
    file = folder.path / folder.entries[1, 0, 0, 1]["file"]
    content = bytearray(file.read_bytes())
    if harm == "lose":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content if harm == "flip" else content[:-10])
    reason = {"flip": "checksum does not match", "cut": "bytes instead of", "lose": "is missing"}[harm]
    for read in (folder.verify, lambda: folder.load((1, 0, 0, 1))):
        with pytest.raises(InputError, match=reason) as raised:
            read()
        assert str(file) in raised.value.message
    folder.load((0, 0, 0, 0))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 9}, "its digest does not match"),
        ({"format": "something"}, "is not a kvtune index folder"),
        ({"format_version": 2}, "has index format 2; this kvtune reads formats up to 1"),
        ({"format_version": "x"}, "is damaged"),
        (None, "is not a kvtune index folder"),
    ],
)
def test_a_strange_manifest_is_refused(change, sentence, trace, tmp_path):
    build_index(trace, tmp_path / "idx", spec(), layers=[0], samples=[0])
    file = tmp_path / "idx" / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text("{" if change is None else json.dumps({**manifest, **change}))
    with pytest.raises(InputError, match=sentence):
        open_index(tmp_path / "idx")


def test_a_manifest_that_claims_other_keys_is_refused(trace, tmp_path):
    build_index(trace, tmp_path / "idx", spec(), layers=[0], samples=[0])
    file = tmp_path / "idx" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"][0]["keys"] = 299
    file.write_text(json.dumps({**manifest, "digest": digest(manifest)}))
    with pytest.raises(InputError, match="does not hold the keys that its manifest says"):
        open_index(tmp_path / "idx").load((0, 0, 0, 0))


def test_no_index_no_folder(tmp_path):
    with pytest.raises(InputError, match="there is no index at"):
        open_index(tmp_path / "nowhere")
