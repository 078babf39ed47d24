"""``kvtune``: registers the subcommands, runs one, turns what goes wrong into an exit code. Nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from kvtune import __version__
from kvtune.commands.environment import prepare
from kvtune.commands.errors import FAILED, show
from kvtune.errors import unknown

# In the order of the work. Each is commands/<name>.py and holds either a function of that name or,
# where there are subcommands, a Typer object `app`; it is imported when somebody asks for it.
COMMANDS = (
    "capture",
    "analyze",
    "simulate",
    "live",
    "tune",
    "profile",
    "policies",
    "models",
    "demo",
    "doctor",
)


class LazyGroup(TyperGroup):
    """A group whose commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise unknown("command", args[0], COMMANDS)
        return super().resolve_command(ctx, args)


def load(name: str) -> click.Command:
    """Import commands/<name>.py and make it a click command."""
    module = import_module(f"kvtune.commands.{name}")
    group: typer.Typer | None = getattr(module, "app", None)
    if group is None:
        group = typer.Typer(add_completion=False, rich_markup_mode=None)
        group.command(name)(getattr(module, name))
    command = typer.main.get_command(group)
    command.name = name
    return command


app = typer.Typer(cls=LazyGroup, add_completion=False, rich_markup_mode=None, no_args_is_help=True)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtune {__version__}")
        raise typer.Exit


@app.callback()
def kvtune(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Measure, simulate and tune the KV cache of long-context LLMs, with evidence."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit code."""
    prepare()
    try:
        result = typer.main.get_command(app).main(list(arguments), "kvtune", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone: nothing to say, and nowhere to say it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        return show(error, as_json="--json" in arguments)
    return result if isinstance(result, int) else 0


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))
