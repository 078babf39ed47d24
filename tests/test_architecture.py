"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("kvtune", "profiles", "commands")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
UNSAFE = re.compile(r"yaml\.(unsafe|full)_load|remote_code\s*=\s*True|weights_only\s*=\s*False")
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
HEAVY = ("torch", "transformers", "numpy", "pyarrow", "numba", "faiss", "optuna", "pydantic")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports, wherever in the file, ``from a import b`` as a.b."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name(path)} has a relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def importers(room: str, package: str) -> list[str]:
    """Files of ``room`` that import ``package``."""
    prefix = package + "."
    return [
        name(path)
        for path in SOURCES
        if name(path).startswith(f"{room}/")
        and any(f"{module}.".startswith(prefix) for module in imported(path))
    ]


def test_the_scan_sees_the_house():
    assert importers("commands", "kvtune.commands") and importers("profiles", "kvtune.policies")


@pytest.mark.parametrize(
    ("room", "package"),
    [("kvtune", "kvtune.commands"), ("kvtune", "kvtune.profiles"), ("profiles", "kvtune.commands")],
)
def test_arrows_run_one_way(room, package):
    assert importers(room, package) == []


def test_files_are_short():
    assert [name(path) for path in SOURCES if len(path.read_text(encoding="utf-8").splitlines()) > 400] == []


def test_nothing_runs_code_from_a_file():
    for path in SOURCES:
        assert not UNSAFE.search(path.read_text(encoding="utf-8")), name(path)
        assert not {module.partition(".")[0] for module in imported(path)} & UNSAFE_MODULES, name(path)
        safe = [
            node.name
            for node in nodes(path)
            if isinstance(node, ast.ClassDef) and "yaml.SafeLoader" in map(ast.unparse, node.bases)
        ]
        for call in (node for node in nodes(path) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            assert called not in ("eval", "exec"), name(path)
            if called == "yaml.load":
                assert ast.unparse(call.args[1]) in safe, f"{name(path)}: derive the loader from SafeLoader"


def test_only_the_output_object_prints():
    printing = {
        name(path)
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    }
    assert printing == {"commands/output.py", "commands/errors.py"}


def test_every_folder_with_modules_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["setuptools"]["packages"]
    installed = {re.sub(r"^kvtune\.(commands|profiles)", r"\1", package) for package in listed}
    assert installed == {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES}


def test_test_files_have_names_of_their_own():
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("module", ["kvtune", "kvtune.errors", "kvtune.progress", "kvtune.commands.app"])
def test_light_modules_do_not_import_heavy_ones(module):
    code = f"import sys, {module}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
