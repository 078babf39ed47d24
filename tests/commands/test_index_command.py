from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvtune.geometry import ModelGeometry
from kvtune.traces import TraceWriter

pytest.importorskip("faiss")


@pytest.fixture(scope="module")
def keyed_trace(tmp_path_factory) -> Path:
    """One sample, two layers (the second windowed), 150 prompt tokens, 3 decode steps."""
    path = tmp_path_factory.mktemp("index") / "small.trace"
    geometry = ModelGeometry(
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        head_dim=8,
        value_dim=8,
        dtype="float32",
        max_positions=512,
        scaling=8**-0.5,
        windows=(None, 16),
        softcaps=(None, None),
        sinks=(False, False),
    )
    header = {
        "model": "tiny-random",
        "fingerprint": "0123456789abcdef",
        "geometry": geometry.to_dict(),
        "dtype": "float32",
        "layers": [0, 1],
        "kv_heads": [0],
        "values": False,
    }
    generator = torch.Generator().manual_seed(0)
    writer = TraceWriter(path, header)
    with writer.sample(0) as sample:
        parent, start = -1, 0
        for kind, length in (("context", 140), ("question", 10), ("generated", 3)):
            ids = torch.zeros(length, dtype=torch.int64)
            parent = sample.segment(kind=kind, request=0, turn=0, parent=parent, start=start, token_ids=ids)
            for layer in (0, 1):
                sample.keys_values(layer, parent, torch.randn(1, length, 8, generator=generator), None)
                if kind == "generated":
                    positions = torch.arange(start, start + length)
                    asked = torch.randn(length, 2, 8, generator=generator)
                    sample.queries(layer, parent, positions, torch.arange(length), 0, asked)
            start += length
        sample.record(0, 0, "random", reference="yes", generated="yes", score=None)
    writer.finish()
    return path


def test_build_show_and_eval_walk_together(cli, keyed_trace, tmp_path):
    folder = tmp_path / "idx"
    ran = cli("index", "build", keyed_trace, "--set", "nlist=8", "--layers", "0", "--out", folder)
    assert ran.exit_code == 0, ran.err
    assert "1 ivf indexes of 150 keys" in ran.out
    assert ran.out.splitlines()[-2:] == [
        f"wrote {folder}",
        f"next: kvtune index eval {keyed_trace} --index {folder}",
    ]
    assert "note: 150 keys train 8 lists; Faiss advises 39 per list" in ran.err
    shown = cli("index", "show", folder)
    assert shown.exit_code == 0 and "ivf index by inner_product (nlist=8, nprobe=8)" in shown.out
    assert "all checksums match" in shown.out
    document = json.loads(cli("index", "show", folder, "--json").out)
    assert document["verified"] is True and document["kind"] == "ivf" and len(document["files"]) == 1
    measured = cli("index", "eval", keyed_trace, "--index", folder, "--json")
    curve = json.loads(measured.out)["curve"]
    assert [row["value"] for row in curve] == [1, 2, 4, 8]
    assert set(curve[0]) == {"parameter", "value", "recall_at_100", "scan_bytes", "milliseconds"}
    assert curve[-1]["recall_at_100"] == 1.0


def test_default_folder_lies_beside_the_trace(cli, keyed_trace):
    folder = keyed_trace.with_name("small.trace-flat-index")
    assert cli("index", "build", keyed_trace, "--kind", "flat", "--quiet").out == f"{folder}\n"
    assert folder.is_dir()
    again = cli("index", "build", keyed_trace, "--kind", "flat")
    assert again.exit_code == 2 and f"'{folder}' exists already" in again.err
    assert cli("index", "build", keyed_trace, "--kind", "flat", "--overwrite").exit_code == 0


def test_sweep_is_printed_with_the_exact_search_below(cli, keyed_trace):
    ran = cli("index", "eval", keyed_trace, "--kind", "hnsw", "--sweep", "efSearch=100,120")
    assert ran.exit_code == 0, ran.err
    rows = [line.split()[0] for line in ran.out.splitlines() if "ms" in line]
    assert rows == ["100", "120", "exact"]
    assert "truth: top-100 by exact inner product" in ran.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["eval", "--kind", "hsnw"], "unknown kind of index 'hsnw'"),
        (["eval", "--set", "nlists=3"], "unknown parameter of index kind 'ivf' 'nlists'"),
        (["eval", "--sweep", "nprobe"], "--sweep 'nprobe' is not NAME=V,V,..."),
        (["eval", "--sweep", "nprobe=1,x"], "--sweep 'nprobe=1,x' is not NAME=V,V,..."),
        (["eval", "--sweep", "nprobe=0"], "nprobe of index kind 'ivf' must be 1 or more, not '0'"),
        (["eval", "--sweep", "efSearch=3"], "unknown parameter of index kind 'ivf' 'efSearch'"),
        (["eval", "--metric", "cosine"], "unknown metric 'cosine'"),
        (["eval", "--layers", "1"], "layer 1 has a sliding window"),
        (["eval", "--layers", "2"], "layer 2 is out of range"),
        (["eval", "--samples", "1"], "sample 1 is out of range"),
        (["eval", "--timelines", "1"], "timeline 1 is out of range"),
        (["eval", "--device", "tpu9"], "device 'tpu9' is not available here"),
        (["eval", "--index", "nowhere"], "there is no index at 'nowhere'"),
        (["eval", "--index", "nowhere", "--kind", "pq"], "--index excludes --kind, --set and --metric"),
        (["build", "--set", "nlist=151"], "nlist=151 of index kind 'ivf' needs at least 151 keys"),
        (["build", "--kind", "pq", "--set", "subvectors=3"], "8 does not divide into 3 subvectors"),
    ],
)
def test_bad_input_is_one_sentence(cli, keyed_trace, tmp_path, arguments, sentence):
    extra = ["--out", tmp_path / "idx"] if arguments[0] == "build" else []
    ran = cli("index", arguments[0], keyed_trace, *arguments[1:], *extra)
    assert ran.exit_code == 2 and ran.out == ""
    assert sentence in ran.err.splitlines()[0] and len(ran.err.splitlines()) <= 2
    assert not (tmp_path / "idx").exists()


def test_show_names_the_corrupt_file(cli, keyed_trace, tmp_path):
    assert cli("index", "build", keyed_trace, "--kind", "kmeans", "--out", tmp_path / "idx").exit_code == 0
    file = next((tmp_path / "idx").rglob("*.npz"))
    file.write_bytes(file.read_bytes()[:-1])
    ran = cli("index", "show", tmp_path / "idx")
    assert ran.exit_code == 2 and f"'{file}' is damaged" in ran.err
