"""``kvtune``: registers the subcommands, runs one, turns what goes wrong into an exit code. Nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvtune import __version__
from kvtune.commands.environment import prepare
from kvtune.commands.errors import FAILED, show
from kvtune.errors import unknown

# In the order of the work. Each is commands/<name>.py and holds either a function of that name or,
# where there are subcommands, a Typer object `app`.
COMMANDS = (
    "capture",
    "analyze",
    "index",
    "simulate",
    "calibrate",
    "live",
    "tune",
    "profile",
    "policies",
    "models",
    "demo",
    "doctor",
)


class InOrder(TyperGroup):
    """Lists its commands in the order of the work, groups among them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in COMMANDS if name in self.commands]


def build(names: Iterable[str]) -> typer.Typer:
    """The program with only the commands ``names``: their modules, and no others, are imported."""
    app = typer.Typer(
        cls=InOrder,
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(kvtune)
    for name in names:
        module = import_module(f"kvtune.commands.{name}")
        group: typer.Typer | None = getattr(module, "app", None)
        if group is None:
            function = getattr(module, name)
            app.command(name, short_help=(function.__doc__ or "").partition("\n")[0])(function)
        else:
            group.rich_markup_mode = None
            app.add_typer(group, name=name, no_args_is_help=False)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtune {__version__}")
        raise typer.Exit


def kvtune(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Measure, simulate and tune the KV cache of long-context LLMs, with evidence."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit code."""
    prepare()
    try:
        invoke(list(arguments) or ["--help"])
        sys.stdout.flush()
    except typer.Exit as leaving:
        return leaving.exit_code
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        return show(error, as_json="--json" in arguments)
    return 0


def invoke(arguments: list[str]) -> None:
    """Run one command line; whatever it raises is the caller's."""
    name = arguments[0]
    if not name.startswith("-") and name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    names = COMMANDS if name in ("-h", "--help") else [name] if name in COMMANDS else []
    command = typer.main.get_command(build(names))
    # Not command.main(): it would swallow an interruption with its notes.
    with command.make_context("kvtune", arguments) as context:
        command.invoke(context)


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))
