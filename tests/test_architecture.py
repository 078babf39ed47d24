"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("kvtune", "profiles", "commands")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
MAY_IMPORT = {
    "kvtune": set(),
    "profiles": {"kvtune.profiles"},
    "commands": {"kvtune.profiles", "kvtune.commands"},
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports, wherever in the file, ``from a import b`` as a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_arrows_run_one_way(path: Path):
    room = path.relative_to(ROOT).parts[0]
    for module in imported(path):
        face = re.match(r"kvtune\.(commands|profiles)\b", module)
        assert face is None or face.group() in MAY_IMPORT[room], f"{name(path)} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_no_relative_imports(path: Path):
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    assert not [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level]


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_files_are_short(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_nothing_runs_code_from_a_file(path: Path):
    text = path.read_text(encoding="utf-8")
    for unsafe in (r"yaml\.(unsafe|full)_load", r"remote_code\s*=\s*True", r"weights_only\s*=\s*False"):
        assert not re.search(unsafe, text), unsafe
    modules = {module.split(".")[0] for module in imported(path)}
    assert not modules & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    tree = ast.parse(text)
    safe = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and [ast.unparse(base) for base in node.bases] == ["yaml.SafeLoader"]
    ]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = ast.unparse(call.func)
        assert called not in ("eval", "exec")
        if called == "yaml.load":
            assert ast.unparse(call.args[1]) in safe, "only a loader derived from yaml.SafeLoader"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_only_the_output_object_prints(path: Path):
    if name(path) in ("commands/output.py", "commands/errors.py"):
        return
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    assert "print" not in [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]


def test_every_folder_with_modules_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["setuptools"]["packages"]
    installed = {re.sub(r"^kvtune\.(commands|profiles)", r"\1", package) for package in listed}
    assert installed == {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES}


def test_test_files_have_names_of_their_own():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("module", ["kvtune", "kvtune.errors", "kvtune.progress", "kvtune.commands.app"])
def test_light_modules_do_not_import_heavy_ones(module: str):
    heavy = ("torch", "transformers", "numpy", "pyarrow", "numba", "faiss", "optuna", "pydantic")
    code = f"import sys, {module}; print(*[m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
