"""``kvtune analyze --compare`` as a user types it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from clustered_traces import write_clustered

from kvtune.commands.analyze import default_out
from kvtune.commands.comparison import split_settings
from kvtune.errors import InputError


@pytest.fixture(scope="module")
def clustered(tmp_path_factory) -> Path:
    return write_clustered(tmp_path_factory.mktemp("command") / "clustered", samples=1)


@pytest.fixture
def trace(clustered, tmp_path) -> Path:
    """A trace of one's own, so that outputs beside it stay apart."""
    return Path(shutil.copytree(clustered, tmp_path / "clustered"))


def test_one_table_by_error_and_what_to_do_next(cli, trace, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = cli("analyze", trace, "--compare", "streaming,quest,infllm", "--layers", "0-1")
    assert code == 0, err
    lines = out.splitlines()
    assert max(len(line) for line in lines if str(trace) not in line) <= 100
    start = next(at for at, line in enumerate(lines) if line.split()[:2] == ["policy", "error"])
    rows = [line.split() for line in lines[start + 2 : lines.index("", start)]]
    assert {row[0] for row in rows} == {
        "full", "full_fp8", "oracle_topk", "streaming", "quest", "infllm"
    }  # fmt: skip
    errors = [float(row[1]) for row in rows]
    assert errors == sorted(errors)
    assert "infllm is not at the target" in out
    assert lines[-1].startswith("next: kvtune tune") and lines[-1].endswith("--policy streaming")
    assert (default_out(trace) / "compare.html").is_file()


def test_json_is_one_document(cli, trace, tmp_path):
    code, out, err = cli(
        "analyze", trace, "--compare", "quest", "--set", "quest.page_size=8", "--read-bytes", 150_000,
        "--json", "--out", tmp_path / "here",
    )  # fmt: skip
    assert code == 0, err
    document = json.loads(out, parse_constant=pytest.fail)
    quest = next(row for row in document["policies"] if row["name"] == "quest")
    assert quest["params"]["page_size"] == 8
    assert quest["read_bytes_per_step"] == pytest.approx(150_000, rel=0.02)
    assert Path(document["files"]["compare"]).is_file()


def test_quiet_prints_the_folder_alone(cli, trace):
    assert cli("analyze", trace, "--compare", "streaming", "-q")[1] == f"{default_out(trace)}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--compare", "qest"), "did you mean 'quest'"),
        (("--compare", "quest,quest"), "named twice"),
        (("--compare", ","), "no policy to compare"),
        (("--compare", "quest", "--policy", "quest"), "--policy"),
        (("--compare", "quest", "--sensitivity"), "exclude"),
        (("--compare", "quest", "--precisions", "fp8"), "--precisions goes with --sensitivity"),
        (("--compare", "quest", "--set", "page_size=8"), "--set quest.page_size=8"),
        (("--compare", "quest", "--layers", "0-9"), "layer 9"),
        (("--compare", "quest", "--device", "cuda:99"), "device 'cuda:99'"),
        (("--compare", "quest", "--read-bytes", "-1"), "--read-bytes"),
        (("--compare", "quest", "--live", "4"), "--live must lie in 1…1"),
        (("--read-bytes", "9"), "--read-bytes goes with --compare"),
        (("--live", "1"), "--live goes with --compare"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(cli, trace, arguments, words):
    code, _, err = cli("analyze", trace, *arguments)
    assert code == 2
    assert words in err and "Traceback" not in err
    assert not default_out(trace).exists()


def test_settings_are_split_by_policy():
    given = {"quest.page_size": 8, "infllm.block": 64, "infllm.n_init": 4}
    assert split_settings(given) == {"quest": {"page_size": 8}, "infllm": {"block": 64, "n_init": 4}}
    with pytest.raises(InputError):
        split_settings({"page_size": 8})
