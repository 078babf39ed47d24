from __future__ import annotations

import errno
import json

import pytest
import typer

from kvtune.commands.errors import kept, report, show
from kvtune.errors import Infeasible, InputError, KvtuneError, RunError, TraceError, unknown


class OutOfMemoryError(RuntimeError):
    """Named like torch's own."""


def interrupted_with_note() -> KeyboardInterrupt:
    try:
        with kept(lambda: "3 of 10 samples are kept"):
            raise KeyboardInterrupt
    except KeyboardInterrupt as interruption:
        return interruption


def noted(error: Exception, note: str) -> Exception:
    error.add_note(note)
    return error


NO_FILE = FileNotFoundError(errno.ENOENT, "No such file or directory", "a.txt")
FULL = OSError(errno.ENOSPC, "No space left on device")
TYPO = unknown("policy", "wave_indx", ["full", "wave_index"])
NO_FAISS = ModuleNotFoundError("No module named 'faiss'", name="faiss")
USAGE = typer.BadParameter("'x' is not a valid\n integer.")

TABLE = [
    (InputError("no such file", "look again"), "no such file", "look again", 2),
    (TraceError("x.parquet is truncated"), "x.parquet is truncated", None, 2),
    (RunError("the disk is full"), "the disk is full", None, 1),
    (KvtuneError("it broke"), "it broke", None, 1),
    (Infeasible("nothing satisfies --max-error 0"), "nothing satisfies --max-error 0", None, 3),
    (TYPO, "unknown policy 'wave_indx'", "did you mean 'wave_index'?", 2),
    (unknown("task", "zzz", ["b", "a"]), "unknown task 'zzz'", "known: a, b", 2),
    (KeyboardInterrupt(), "interrupted", None, 130),
    (typer.Abort(), "interrupted", None, 130),
    (interrupted_with_note(), "interrupted", "3 of 10 samples are kept", 130),
    (USAGE, "invalid value: 'x' is not a valid integer", "see 'kvtune --help'", 2),
    (NO_FAISS, "the Python package 'faiss' is missing", "run 'kvtune doctor'", 1),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "a file that should be text is not UTF-8", None, 2),
    (NO_FILE, "no such file or directory: a.txt", None, 2),
    (PermissionError(errno.EACCES, "Permission denied", "a.txt"), "permission denied: a.txt", None, 2),
    (FileExistsError(errno.EEXIST, "File exists", "out"), "file exists: out", None, 2),
    (OSError(errno.ENOSPC, "No space left on device", "t/kv"), "the disk is full: t/kv", None, 1),
    (noted(FULL, "2 samples are kept"), "the disk is full", "2 samples are kept", 1),
    (OSError(errno.EIO, "Input/output error"), "input/output error", None, 1),
]


@pytest.mark.parametrize(("error", "message", "hint", "code"), TABLE, ids=lambda value: repr(value)[:40])
def test_table(error, message, hint, code):
    found = report(error)
    assert (found.error, found.hint, found.exit_code) == (message, hint, code)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory(error):
    found = report(error)
    assert found.error == "out of memory" and "--layers" in (found.hint or "") and found.exit_code == 1


def test_the_unexpected_is_one_sentence_and_says_how_to_get_the_traceback():
    found = report(ZeroDivisionError("division by zero\nand more"))
    assert found.error == "unexpected ZeroDivisionError: division by zero"
    assert found.hint is not None and "KVTUNE_DEBUG=1" in found.hint and found.exit_code == 1
    assert report(KeyError()).error == "unexpected KeyError"


def test_shown_as_text(capsys, monkeypatch):
    monkeypatch.delenv("KVTUNE_DEBUG", raising=False)
    assert show(InputError("no such file", "look again"), as_json=False) == 2
    assert capsys.readouterr() == ("", "error: no such file\nhint: look again\n")


def test_shown_as_json(capsys, monkeypatch):
    monkeypatch.delenv("KVTUNE_DEBUG", raising=False)
    assert show(Infeasible("nothing fits"), as_json=True) == 3
    out, err = capsys.readouterr()
    assert out == "" and json.loads(err) == {"error": "nothing fits", "hint": None, "exit_code": 3}


@pytest.mark.parametrize(("value", "traced"), [("1", True), ("0", False), ("", False)])
def test_traceback_on_request_only(value, traced, capsys, monkeypatch):
    monkeypatch.setenv("KVTUNE_DEBUG", value)
    try:
        raise InputError("no such file")
    except InputError as error:
        show(error, as_json=False)
    err = capsys.readouterr().err
    assert ("Traceback" in err) is traced and err.endswith("error: no such file\n")
