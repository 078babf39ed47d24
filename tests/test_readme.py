"""README and CONTRIBUTING name what there is: every row of every registry, every file they point to."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from kvtune.caching import caches
from kvtune.commands.app import COMMANDS, build
from kvtune.models import CATALOG
from kvtune.policies import all_policies
from kvtune.profiles.exporters import engines
from kvtune.workloads import workload_names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, str]:
    """The table whose first column is called ``heading``: name → rest of the row."""
    table = re.search(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", README, re.MULTILINE)
    assert table, heading
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table.group(1), re.MULTILINE))


@pytest.mark.parametrize(
    ("heading", "names"),
    [("policy", all_policies()), ("cache", caches()), ("task", workload_names()), ("engine", engines())],
)
def test_tables_list_every_row(heading, names):
    assert sorted(rows(heading)) == sorted(names)


def test_engine_versions():
    for engine, versions in engines().items():
        assert rows("engine")[engine].split(" | ")[0] == ", ".join(versions)


def test_packaged_models():
    for model in CATALOG.values():
        assert model.name in README and model.install in README


def tour() -> list[str]:
    """Command lines in the README's code blocks (comments cut off)."""
    blocks = re.findall(r"^```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    lines = [line.partition("  #")[0] for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("kvtune ")]


def test_the_tour_is_there():
    assert {line.split()[1] for line in tour()} >= {
        "capture",
        "analyze",
        "simulate",
        "tune",
        "live",
        "profile",
    }


@pytest.mark.parametrize("line", tour())
def test_the_commands_take_what_the_readme_types(line):
    _, *words = shlex.split(line)
    assert words[0] in COMMANDS
    command = typer.main.get_command(build([words[0]]))
    while hasattr(command, "commands") and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    command.make_context("kvtune", words)


def test_files_that_contributing_points_to_exist():
    paths = {
        path
        for path in re.findall(r"`((?:kvtune|profiles|commands|tests|benchmarks)/[\w./]*)`", CONTRIBUTING)
    }
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("_MODULES", "kvtune/policies/__init__.py"),
        ("SMALL", "tests/policies/test_conformance.py"),
        ("_CACHES", "kvtune/caching/registry.py"),
        ("EXPORTERS", "profiles/exporters/registry.py"),
        ("_WORKLOADS", "kvtune/workloads/registry.py"),
        ("CATALOG", "kvtune/models/catalog.py"),
        ("COMMANDS", "commands/app.py"),
    ],
)
def test_tables_that_contributing_names_exist(name, file):
    assert f"`{name}`" in CONTRIBUTING and f"`{file}`" in CONTRIBUTING
    assert re.search(rf"^{name}\b.*=", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
