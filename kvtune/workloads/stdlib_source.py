"""The Python standard library's own source: its files, and the documented functions in them."""

from __future__ import annotations

import ast
import sys
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from kvtune.errors import InputError

# Tables, tests and vendored tools rather than library code.
_LEFT_OUT = frozenset(
    {"antigravity", "this", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data", "ensurepip"}
    | {"distutils", "tkinter"}
)
_LEFT_OUT_FOLDERS = frozenset({"test", "tests", "__pycache__", "site-packages"})
_LEAST_DESCRIPTION, _MOST_DESCRIPTION = 30, 300  # characters
_LEAST_NAME = 4


@dataclass(frozen=True)
class Function:
    """A function or method: name, first paragraph of its docstring, where its source ends [characters]."""

    name: str
    description: str
    end: int


@lru_cache(maxsize=1)
def source_files() -> tuple[str, ...]:
    """The library's source files as sorted names like ``json/decoder.py``.

    Raises ``InputError`` where Python is installed without them.
    """
    root = _root()
    names: list[str] = []
    for module in sorted(sys.stdlib_module_names - _LEFT_OUT):
        if module.startswith("_"):
            continue
        if (root / f"{module}.py").is_file():
            names.append(f"{module}.py")
        for path in sorted((root / module).rglob("*.py")):
            name = path.relative_to(root)
            if not _LEFT_OUT_FOLDERS.intersection(name.parts):
                names.append(name.as_posix())
    if not names:
        raise InputError(
            "this Python is installed without the source of its standard library, which code_search reads",
            "use another task, or --prompts with files of your own",
        )
    return tuple(sorted(names))


@lru_cache(maxsize=512)
def read_source(name: str) -> str:
    """The text of one of ``source_files()``."""
    return (_root() / name).read_text(encoding="utf-8")


@lru_cache(maxsize=512)
def documented_functions(name: str) -> tuple[Function, ...]:
    """A file's functions whose docstring describes them without giving the name away, in source order."""
    source = read_source(name)
    line_ends = list(accumulate(len(line) + 1 for line in source.split("\n")))
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if _askable(node.name, text) and node.end_lineno is not None:
            found.append(Function(node.name, text, line_ends[node.end_lineno - 1] - 1))
    return tuple(sorted(found, key=lambda function: (function.end, function.name)))


def _askable(name: str, description: str) -> bool:
    if name.startswith("__") or len(name) < _LEAST_NAME:
        return False
    if not _LEAST_DESCRIPTION <= len(description) <= _MOST_DESCRIPTION:
        return False
    given, plain = description.lower(), name.lower().strip("_")
    return plain not in given and plain.replace("_", " ") not in given


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))
