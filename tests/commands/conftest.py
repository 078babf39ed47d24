"""Ways to run the program beside ``cli``: in a process of its own, and on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest
from command_line import Ran

MAIN = "from kvtune.commands.app import main; main()"


@pytest.fixture
def environment() -> Callable[[Mapping[str, str]], dict[str, str]]:
    """``environment({…})``: this process's environment without what steers the output, plus changes."""
    steering = ("KVTUNE_DEBUG", "COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM")
    steering += ("TQDM_DISABLE", "TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS")
    inherited = {key: value for key, value in os.environ.items() if key not in steering}
    return lambda changes: inherited | dict(changes)


@pytest.fixture
def shell(environment) -> Callable[..., Ran]:
    """``shell("policies", env={…}, flags=("-W", "error"))``: exit code and what goes into the pipes."""

    def call(
        *arguments: object,
        env: Mapping[str, str] = MappingProxyType({}),
        flags: tuple[str, ...] = (),
        code: str = MAIN,
        decode: str = "utf-8",
    ) -> Ran:
        command = [sys.executable, *flags, "-c", code, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, env=environment(env), check=False)
        return Ran(done.returncode, done.stdout.decode(decode), done.stderr.decode(decode))

    return call


@pytest.fixture
def terminal(environment) -> Callable[..., str]:
    """``terminal("policies")``: everything that a terminal of 60 columns is sent, both streams mixed."""

    def call(*arguments: object, env: Mapping[str, str] = MappingProxyType({}), code: str = MAIN) -> str:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment({"TERM": "xterm", "COLUMNS": "60"} | dict(env)),
        )
        os.close(theirs)
        sent = b""
        try:
            while piece := os.read(ours, 65536):
                sent += piece
        except OSError:
            pass  # Linux reports a terminal whose other side has gone as an error.
        os.close(ours)
        assert process.wait() == 0, sent
        return sent.decode()

    return call
