from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
from collections import namedtuple

import pytest

from kvtune.commands import machine
from kvtune.commands.machine import Problem

Usage = namedtuple("Usage", "total used free")


def test_one_json_document(cli):
    ran = cli("doctor", "--json")
    document = json.loads(ran.out)
    assert ran.err == ""
    assert document["versions"]["torch"] and document["versions"]["kvtune"] and document["versions"]["python"]
    assert document["device"]["torch"] in ("cpu", "cuda")
    assert document["faiss"]["build"] in ("cpu", "gpu", None)
    assert {"name", "installed", "converted", "install"} == set(document["models"][0])
    assert document["cache"]["folder"] == os.environ["KVTUNE_CACHE"]
    assert document["cores"] >= 1 and document["memory"]["total_bytes"] > 0
    assert ran.exit_code == (1 if document["problems"] else 0)


def test_problems_are_printed_with_hints_and_fail(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    ran = cli("doctor")
    assert ran.exit_code == 1
    assert "problem: Faiss is not installed\n   hint: pip install faiss-cpu" in ran.out
    assert json.loads(cli("doctor", "--json").out)["faiss"] == {"version": None, "build": None}


def test_quiet_says_it_by_the_exit_code(cli, monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda: ({}, [Problem("little memory", "buy some")]))
    ran = cli("doctor", "--quiet")
    assert (ran.exit_code, ran.out, ran.err) == (1, "", "")


def test_packages_are_held_against_the_requirements(monkeypatch):
    required = ["torch>=999", "numpy>=1", "no-such-package>=2", "no-such-extra; extra == 'dev'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    versions, problems = machine.packages()
    assert versions["no-such-package"] is None and "no-such-extra" not in versions
    assert [problem.hint for problem in problems] == [
        "pip install 'torch>=999'",
        "pip install 'no-such-package>=2'",
    ]
    assert "too old" in problems[0].problem and "not installed" in problems[1].problem


def test_a_driver_without_cuda_in_torch_is_a_problem(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert machine.device()[1] == []
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    document, problems = machine.device()
    assert document["torch"] == "cpu" and "CPU build" in problems[0].problem


def test_folders(tmp_path, monkeypatch):
    document, problems = machine.folder(tmp_path / "not" / "yet", "the model cache")
    assert document["writable"] and document["free_bytes"] > 0 and problems == []
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2, 1, 1))
    document, problems = machine.folder(tmp_path, "the model cache")
    assert not document["writable"] and document["free_bytes"] == 1
    assert ["cannot be written" in problems[0].problem, "little is free" in problems[1].problem] == [True] * 2


def test_little_memory(monkeypatch):
    monkeypatch.setattr(machine, "_available_memory", lambda: 2**30)
    document, problems = machine.memory()
    assert document["available_bytes"] == 2**30 and len(problems) == 1


def test_a_missing_library_does_not_stop_the_doctor(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvtune.models.catalog", None)
    document = json.loads(cli("doctor", "--json").out)
    assert document["models"] == [] and document["cache"] is None
    ran = cli("doctor")
    assert ran.exit_code == 1 and "unknown" in ran.out and "reinstall kvtune" in ran.out


def test_packaged_model_before_and_after_conversion(monkeypatch):
    from kvtune.models import conversion

    for converted in (False, True):
        monkeypatch.setattr(conversion, "is_converted", lambda path, answer=converted: answer)
        rows, _, _ = machine.models()
        assert all(row["converted"] is (row["installed"] and converted) for row in rows)


def test_versions_are_the_installed_ones():
    versions, _ = machine.packages()
    assert versions["pydantic"] == importlib.metadata.version("pydantic")
