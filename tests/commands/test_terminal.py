"""What the program does about pipes, terminals, encodings and other people's warnings."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtune.commands import errors
from kvtune.commands.environment import ASCII

BARS = """
from kvtune.commands.output import Output
output = Output(json={json}, quiet={quiet})
with output.progress.task("capturing", 4) as step:
    for _ in range(4):
        step.advance(note="12 tokens/s")
output.table(["name", "count"], [["full", 3]], title="a title")
output.result({{"answer": 42}}, lambda out: out.line("done"))
"""
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def test_progress_is_drawn_on_a_terminal(terminal):
    sent = terminal(code=BARS.format(json=False, quiet=False))
    assert "capturing" in sent and "12 tokens/s" in sent and "4/4" in sent
    assert ESCAPE.sub("", sent).rstrip().endswith("done")


def test_tasks_within_tasks(terminal):
    code = """
from kvtune.commands.output import Output
output = Output()
with output.progress.task("outer [x]", 2) as outer:
    with output.progress.task("inner", None) as inner:
        inner.advance(note="[bold]5[/]")
    outer.advance()
output.line("done")
"""
    sent = ESCAPE.sub("", terminal(code=code))
    assert "outer [x]" in sent and sent.rstrip().endswith("done")


def test_progress_is_silent_when_quiet_or_on_a_dumb_terminal(terminal):
    assert "capturing" not in terminal(code=BARS.format(json=False, quiet=True))
    assert "capturing" not in terminal(code=BARS.format(json=False, quiet=False), env={"TERM": "dumb"})


def test_no_progress_and_no_colour_in_pipes(shell):
    ran = shell(code=BARS.format(json=False, quiet=False))
    assert ran.exit_code == 0 and ran.err == "" and "\x1b" not in ran.out
    assert "capturing" not in ran.out and ran.out.endswith("done\n")


@pytest.mark.parametrize("json_mode", [False, True])
def test_no_colour_where_it_is_not_wanted(terminal, json_mode):
    sent = terminal(code=BARS.format(json=json_mode, quiet=False), env={"NO_COLOR": "1"})
    colours = [code for code in re.findall(r"\x1b\[([0-9;]*)m", sent) if re.search(r"\b(3|4|9)\d\b", code)]
    assert colours == []


def test_a_terminal_sets_the_width(terminal):
    code = """
from kvtune.commands.output import Output
output = Output()
output.line("word " * 50)
output.table(["name", "text"], [["full", "word " * 50]])
output.closing(None, "kvtune " + "word " * 50)
"""
    *wrapped, closing = ESCAPE.sub("", terminal(code=code)).rstrip().split("\n")
    assert len(wrapped) > 8 and max(len(line.rstrip("\r")) for line in wrapped) <= 60
    assert len(closing) > 200, "a command to copy is one line"


@pytest.mark.parametrize("columns", ["50", "70"])
def test_help_follows_the_width(terminal, columns):
    lines = terminal("doctor", "--help", env={"COLUMNS": columns}).split("\r\n")
    assert "Usage: kvtune doctor" in lines[0] and max(map(len, lines)) <= int(columns)


@pytest.mark.parametrize(
    ("encoding", "line", "note"),
    [
        ("ascii", "a -> b ... <= 3 x d ?", "+-1"),
        ("latin-1", "a -> b ... <= 3 × d ?", "±1"),
        ("cp1252", "a -> b … <= 3 × d ?", "±1"),
        ("utf-8", "a → b … ≤ 3 × Δ 見", "±1"),
    ],
)
def test_any_encoding_will_do(shell, encoding, line, note):
    code = """
from kvtune.commands.environment import prepare
from kvtune.commands.output import Output
prepare()
output = Output()
output.line("a → b … ≤ 3 × Δ 見")
output.table(["name"], [["é"]])
output.note("±1")
"""
    ran = shell(code=code, env={"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}, decode=encoding)
    assert ran.exit_code == 0 and ran.err == note + "\n"
    assert ran.out.splitlines()[0] == line
    assert ("─" in ran.out) is (encoding == "utf-8") and "?--" not in ran.out


def test_whatever_a_command_writes_can_be_spelled_in_ascii():
    for path in Path(errors.__file__).parent.glob("*.py"):
        beyond = {character for character in path.read_text(encoding="utf-8") if not character.isascii()}
        assert beyond <= set(ASCII), path.name


def test_json_survives_an_ascii_pipe(shell):
    code = "from kvtune.commands.output import Output; Output(json=True).result({'text': 'é→見'}, print)"
    ran = shell(code=code, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert json.loads(ran.out) == {"text": "é→見"}


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("policies", "--json")])
def test_works_where_warnings_are_errors(shell, arguments):
    ran = shell(*arguments, flags=("-W", "error"))
    assert ran.exit_code == 0 and ran.err == ""


CHATTER = """
import logging, sys, warnings
from kvtune.commands.environment import prepare
prepare()
warnings.warn("a warning of somebody else")
logging.getLogger("transformers").warning("a log line of somebody else")
logging.getLogger("transformers").error("an error of somebody else")
from tqdm.auto import tqdm
list(tqdm(range(3), desc="a bar of somebody else"))
"""


def test_chatter_is_kept_out_unless_debugging(shell):
    assert shell(code=CHATTER).err == "an error of somebody else\n"
    told = shell(code=CHATTER, env={"KVTUNE_DEBUG": "1"}).err
    assert "a warning of somebody else" in told and "a log line of somebody else" in told
    assert "a bar of somebody else" in told


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_a_reader_that_leaves_is_no_error(environment, arguments):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", "from kvtune.commands.app import main; main()", *arguments]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment({}), check=False)
    os.close(write)
    assert done.stderr == b"" and done.returncode == 1


def test_ctrl_c(environment):
    code = """
import signal, sys, time, types, typer
# A background job's children ignore the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvtune.commands import app
from kvtune.commands.errors import kept

def boom() -> None:
    with kept(lambda: "2 of 9 samples are kept"):
        print("ready", file=sys.stderr, flush=True)
        time.sleep(60)

module = types.ModuleType("kvtune.commands.boom")
module.boom = boom
sys.modules[module.__name__] = module
app.COMMANDS = (*app.COMMANDS, "boom")
app.main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, "boom"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment({}),
        text=True,
    )
    assert process.stderr is not None and process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130 and out == ""
    assert err == "error: interrupted\nhint: 2 of 9 samples are kept\n"
