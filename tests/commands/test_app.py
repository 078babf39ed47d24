from __future__ import annotations

import json
import re
import sys
from types import ModuleType

import pytest
import typer

from kvtune import __version__
from kvtune.commands import app
from kvtune.commands.environment import ASCII
from kvtune.commands.errors import kept
from kvtune.commands.options import JsonFlag, QuietFlag
from kvtune.commands.output import Output
from kvtune.errors import Infeasible, InputError, RunError


def failing(error: BaseException):
    def boom(json: JsonFlag = False, quiet: QuietFlag = False) -> None:
        """A command that fails."""
        Output(json=json, quiet=quiet).note("working")
        raise error

    return boom


@pytest.fixture
def install(monkeypatch):
    """Make ``function`` the command ``boom``."""

    def add(function) -> None:
        module = ModuleType("kvtune.commands.boom")
        module.boom = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(app, "COMMANDS", (*app.COMMANDS, "boom"))

    return add


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ()])
def test_help_names_every_command(cli, arguments):
    ran = cli(*arguments)
    assert ran.exit_code == 0 and ran.err == ""
    listed = ran.out.partition("Commands:\n")[2]
    assert re.findall(r"^  (\w+)  ", listed, re.MULTILINE) == list(app.COMMANDS)
    assert "..." not in listed


def test_version(cli):
    assert cli("--version") == cli("--version", "capture")
    assert cli("--version").out == f"kvtune {__version__}\n"


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_command_has_help(cli, name):
    ran = cli(name, "--help")
    assert ran.exit_code == 0 and ran.out.startswith(f"Usage: kvtune {name} ")
    assert {character for character in ran.out if not character.isascii()} <= set(ASCII)


def test_json_and_quiet_are_everywhere():
    command = typer.main.get_command(app.build(app.COMMANDS))
    leaves = list(command.commands.values())
    while leaves:
        leaf = leaves.pop()
        if hasattr(leaf, "commands"):
            leaves.extend(leaf.commands.values())
            continue
        options = {option for parameter in leaf.params for option in parameter.opts}
        assert {"--json", "--quiet"} <= options, leaf.name


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_starting_imports_nothing_heavy(shell, flag):
    code = (
        "import sys; from kvtune.commands.app import run; code = run(sys.argv[1:]); "
        "print(code, *[m for m in ('torch', 'transformers', 'numpy', 'pyarrow', 'numba', 'faiss', 'optuna', "
        "'pydantic') if m in sys.modules], file=sys.stderr)"
    )
    assert shell(flag, code=code).err.split() == ["0"]


def test_a_command_imports_only_itself(shell):
    code = (
        "import sys; from kvtune.commands.app import build; build(['policies']); "
        "print(*[m for m in sys.modules if m.startswith('kvtune.commands.')], file=sys.stderr)"
    )
    others = {f"kvtune.commands.{name}" for name in app.COMMANDS if name != "policies"}
    imported = set(shell(code=code).err.split())
    assert "kvtune.commands.policies" in imported and not imported & others


@pytest.mark.parametrize(("typed", "meant"), [("captur", "capture"), ("analyse", "analyze")])
def test_unknown_command(cli, typed, meant):
    ran = cli(typed)
    assert ran.exit_code == 2 and ran.out == ""
    assert ran.err == f"error: unknown command '{typed}'\nhint: did you mean '{meant}'?\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("policies", "--jsn"), "--jsn"),
        (("policies", "extra"), "extra"),
        (("--bogus",), "--bogus"),
        (("simulate",), "missing argument"),
        (("profile",), "missing command"),
        (("profile", "shw"), "shw"),
    ],
)
def test_usage_errors(cli, arguments, said):
    ran = cli(*arguments)
    assert ran.exit_code == 2 and ran.out == ""
    first, second = ran.err.splitlines()
    assert first.startswith("error: ") and said in first
    assert second.startswith("hint: see 'kvtune")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunError("it broke"), 1),
        (InputError("no such file"), 2),
        (Infeasible("nothing fits"), 3),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("division by zero"), 1),
        (typer.Exit(3), 3),
    ],
)
def test_exit_codes(cli, install, error, code):
    install(failing(error))
    ran = cli("boom")
    assert ran.exit_code == code and ran.out == "" and "Traceback" not in ran.err


def test_errors_in_json_mode_are_json_on_stderr(cli, install):
    install(failing(InputError("no such file", "look again")))
    ran = cli("boom", "--json", "--quiet")
    assert ran.out == ""
    assert json.loads(ran.err) == {"error": "no such file", "hint": "look again", "exit_code": 2}


def test_usage_errors_in_json_mode_too(cli):
    ran = cli("policies", "--jsn", "--json")
    assert ran.out == "" and json.loads(ran.err)["exit_code"] == 2


def test_an_interruption_says_what_is_kept(cli, install):
    def boom() -> None:
        with kept(lambda: "3 of 10 samples are kept; run it again with --resume"):
            raise KeyboardInterrupt

    install(boom)
    ran = cli("boom")
    assert ran.exit_code == 130
    assert ran.err == "error: interrupted\nhint: 3 of 10 samples are kept; run it again with --resume\n"


def test_traceback_on_request(cli, install, monkeypatch):
    install(failing(ZeroDivisionError("division by zero")))
    assert "KVTUNE_DEBUG=1" in cli("boom").err
    monkeypatch.setenv("KVTUNE_DEBUG", "1")
    ran = cli("boom")
    assert ran.exit_code == 1 and "Traceback" in ran.err and "ZeroDivisionError: division by zero" in ran.err
