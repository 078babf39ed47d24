"""Killed, interrupted, resumed, overwritten: what stays, what goes, and the same bytes in the end."""

from __future__ import annotations

import errno
import json
import os
import shutil
from itertools import count

import pytest
from tiny_traces import contents, header, write_sample, write_trace

from kvtune.errors import InputError, RunError, TraceError
from kvtune.traces import TraceWriter, atomic, files, open_trace
from kvtune.traces import writer as writer_module


def resume(path, samples=2):
    writer = TraceWriter(path, header(), resume=True)
    for index in set(range(samples)) - writer.completed:
        with writer.sample(index) as sample:
            write_sample(sample, header(), seed=index)
    return writer.finish()


class Snapshots:
    """Copies the trace folder before every write, rename and removal: what a kill there would leave.

    Of the many row groups only some are taken, and no moment that finds the folder as the last one did.
    """

    def __init__(self, monkeypatch, path, into):
        self.path, self.into, self.taken, self.last = path, into, 0, None
        for owner, name in [
            (os, "replace"),
            (files.VectorWriter, "write"),
            (files.VectorWriter, "close"),
            (atomic, "write_json"),
            (writer_module, "remove"),
            (writer_module.shutil, "rmtree"),
        ]:
            monkeypatch.setattr(owner, name, self.before(getattr(owner, name)))

    def before(self, original):
        calls = count()
        apart = 16 if original.__name__ == "write" else 1

        def snapshot_first(*args, **kwargs):
            if next(calls) % apart == 0 and self.path.exists() and self.last != (now := contents(self.path)):
                shutil.copytree(self.path, self.into / str(self.taken))
                self.taken, self.last = self.taken + 1, now
            return original(*args, **kwargs)

        return snapshot_first


def test_killed_anywhere_resumes_to_the_same_bytes(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        snapshots = Snapshots(patched, tmp_path / "t", tmp_path / "killed")
        write_trace(tmp_path / "t")
    whole = contents(tmp_path / "t")
    assert snapshots.taken > 30
    stages = set()
    for killed in (tmp_path / "killed").iterdir():
        if any(killed.iterdir()) and not (killed / "manifest.json").exists():
            # Killed before the first manifest had its name: nothing to resume, nothing lost.
            assert sorted(p.name for p in killed.iterdir()) == ["manifest.json.tmp"]
            continue
        stages.add(len(TraceWriter(killed, header(), resume=True).completed))
        resume(killed)
        assert contents(killed) == whole
        shutil.rmtree(killed)
    assert stages == {0, 1, 2}


def test_order_of_samples_does_not_matter(tmp_path):
    write_trace(tmp_path / "forwards")
    writer = TraceWriter(tmp_path / "backwards", header())
    for index in (1, 0):
        with writer.sample(index) as sample:
            write_sample(sample, header(), seed=index)
    writer.finish()
    assert contents(tmp_path / "forwards") == contents(tmp_path / "backwards")


def test_finish_twice_and_resume_after_finish(tmp_path):
    write_trace(tmp_path / "t")
    whole = contents(tmp_path / "t")
    writer = TraceWriter(tmp_path / "t", header(), resume=True)
    assert writer.completed == {0, 1}
    assert writer.finish() == writer.finish() == open_trace(tmp_path / "t").manifest
    assert contents(tmp_path / "t") == whole
    with pytest.raises(ValueError, match="complete"), writer.sample(2):
        pass


def test_resume_with_nothing_there_starts(tmp_path):
    (tmp_path / "empty").mkdir()
    resume(tmp_path / "empty")
    resume(tmp_path / "new")
    assert contents(tmp_path / "empty") == contents(tmp_path / "new")


def test_a_committed_sample_whose_file_is_gone_is_written_again(tmp_path):
    writer = TraceWriter(tmp_path / "t", header())
    for index in (0, 1):
        with writer.sample(index) as sample:
            write_sample(sample, header(), seed=index)
    (tmp_path / "t/kv/sample=0/layer=2.parquet").unlink()
    assert TraceWriter(tmp_path / "t", header(), resume=True).completed == {1}
    resume(tmp_path / "t")
    write_trace(tmp_path / "whole")
    assert contents(tmp_path / "t") == contents(tmp_path / "whole")


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError("the model failed")])
def test_an_interrupted_sample_leaves_nothing(tmp_path, interruption):
    writer = TraceWriter(tmp_path / "t", header())
    with writer.sample(0) as sample:
        write_sample(sample, header(), seed=0)
    before = contents(tmp_path / "t")
    with pytest.raises((KeyboardInterrupt, RuntimeError)), writer.sample(1) as sample:
        write_sample(sample, header(), seed=1)
        raise interruption
    assert contents(tmp_path / "t") == before
    assert writer.completed == {0}


def test_an_unfinished_trace_is_not_opened(tmp_path):
    TraceWriter(tmp_path / "t", header())
    with pytest.raises(TraceError, match="did not finish") as refused:
        open_trace(tmp_path / "t")
    assert "--resume" in refused.value.hint


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 8}, "seed = 7, not 8"),
        ({"layers": [0]}, "layers"),
        ({"workload": {"task": "tiny", "samples": 3}}, "workload.samples = 2, not 3"),
        ({"extra": 1}, "extra = None, not 1"),
    ],
)
def test_resuming_another_capture_names_the_field(tmp_path, change, field):
    TraceWriter(tmp_path / "t", header())
    before = contents(tmp_path / "t")
    with pytest.raises(InputError, match=field):
        TraceWriter(tmp_path / "t", header(**change), resume=True)
    assert contents(tmp_path / "t") == before


def test_nothing_is_overwritten_silently(tmp_path):
    write_trace(tmp_path / "t")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "t", tmp_path / "empty"):
        before = contents(path)
        with pytest.raises(InputError, match="exists already") as refused:
            TraceWriter(path, header())
        assert "--resume" in refused.value.hint
        assert "--overwrite" in refused.value.hint
        assert contents(path) == before
    with pytest.raises(InputError, match="not both"):
        TraceWriter(tmp_path / "t", header(), resume=True, overwrite=True)


@pytest.mark.parametrize("how", [{"overwrite": True}, {"resume": True}, {}])
def test_what_is_not_a_trace_is_left_alone(tmp_path, how):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.txt").write_text("years of work")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "manifest.json").write_text(json.dumps({"format": "something else"}))
    for path in (folder, foreign, folder / "chapter.txt"):
        with pytest.raises(InputError, match="not a kvtune trace"):
            TraceWriter(path, header(), **how)
    assert (folder / "chapter.txt").read_text() == "years of work"
    assert (foreign / "manifest.json").exists()


def test_overwriting_replaces_the_trace_and_nothing_else(tmp_path):
    write_trace(tmp_path / "t", projections=True)
    (tmp_path / "t/notes.txt").write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept.txt").write_text("kept")
    shutil.rmtree(tmp_path / "t/o_proj")
    (tmp_path / "t/o_proj").symlink_to(elsewhere)
    TraceWriter(tmp_path / "t", header(seed=8), overwrite=True)
    resumed = TraceWriter(tmp_path / "t", header(seed=8), resume=True)
    assert resumed.completed == set()
    assert set(contents(tmp_path / "t")) == {"manifest.json", "notes.txt"}
    assert (elsewhere / "kept.txt").read_text() == "kept"


def test_overwriting_a_broken_or_newer_trace(tmp_path):
    write_trace(tmp_path / "t")
    shutil.rmtree(tmp_path / "t/kv")
    manifest = json.loads((tmp_path / "t/manifest.json").read_text())
    (tmp_path / "t/manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    writer = TraceWriter(tmp_path / "t", header(), overwrite=True)
    with writer.sample(0) as sample:
        write_sample(sample, header(), seed=0)
    writer.finish()
    assert open_trace(tmp_path / "t", verify=True).n_samples == 1


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


FULL_AT = [
    (files.VectorWriter, "write"),
    (files.VectorWriter, "close"),
    (files.pq, "ParquetWriter"),
    (writer_module, "sync"),
    (writer_module, "write_json"),
    (writer_module.os, "replace"),
]


@pytest.mark.parametrize(("owner", "name"), FULL_AT, ids=lambda value: getattr(value, "__name__", value))
def test_a_full_disk_says_what_was_kept(tmp_path, monkeypatch, owner, name):
    writer = TraceWriter(tmp_path / "t", header())
    with writer.sample(0) as sample:
        write_sample(sample, header(), seed=0)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, full)
        with pytest.raises(RunError, match="disk is full") as failed, writer.sample(1) as sample:
            write_sample(sample, header(), seed=1)
    assert failed.value.exit_code == 1
    assert "sample 1" in failed.value.message
    assert "1 complete sample kept" in failed.value.message
    assert "--resume" in failed.value.hint
    assert writer.completed == {0}
    resume(tmp_path / "t")
    write_trace(tmp_path / "whole")
    assert contents(tmp_path / "t") == contents(tmp_path / "whole")


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_commit_that_failed_midway_can_be_repeated(tmp_path, monkeypatch, renames):
    """Keys in place, queries not: the same writer writes the sample again, a resumed one first clears it."""
    writer = TraceWriter(tmp_path / "t", header())
    left, rename = count(), os.replace
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda a, b: full() if next(left) >= renames else rename(a, b))
        with pytest.raises(RunError), writer.sample(0) as sample:
            write_sample(sample, header(), seed=0)
    shutil.copytree(tmp_path / "t", tmp_path / "copy")
    TraceWriter(tmp_path / "copy", header(), resume=True)
    assert set(contents(tmp_path / "copy")) == {"manifest.json"}
    for index in (0, 1):
        with writer.sample(index) as sample:
            write_sample(sample, header(), seed=index)
    writer.finish()
    write_trace(tmp_path / "whole")
    assert contents(tmp_path / "t") == contents(tmp_path / "whole")


def test_a_full_disk_at_the_end_keeps_every_sample(tmp_path, monkeypatch):
    writer = TraceWriter(tmp_path / "t", header())
    for index in (0, 1):
        with writer.sample(index) as sample:
            write_sample(sample, header(), seed=index)
    with monkeypatch.context() as patched:
        patched.setattr(writer_module, "write_json", full)
        with pytest.raises(RunError, match=r"disk is full; 2 complete samples kept"):
            writer.finish()
    writer.finish()
    write_trace(tmp_path / "whole")
    assert contents(tmp_path / "t") == contents(tmp_path / "whole")


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: order.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: order.append(f"rename {b}") or rename(a, b))
    target = tmp_path / "a.json"
    atomic.write_json(target, {})
    assert order == [str(tmp_path / "a.json.tmp"), f"rename {target}", str(tmp_path)]


def test_another_disk_error_is_told_in_its_own_words(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"Not a directory; no complete samples kept") as failed:
        TraceWriter(tmp_path / "file" / "t", header())
    assert failed.value.hint is None
