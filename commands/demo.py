"""``kvtune demo``: the whole line on the packaged model, told as the commands a user would type."""

from __future__ import annotations

import io
import json as json_text
import shlex
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtune.commands.app import invoke
from kvtune.commands.options import JsonFlag, Overwrite, QuietFlag
from kvtune.commands.output import Output, bytes_text, cell, seconds_text
from kvtune.errors import InputError

MODEL = "smollm2-135m"
BUDGETS = "0.02,0.05,0.1,0.2"
ENGINES = ("retroinfer", "transformers")


@dataclass(frozen=True)
class Step:
    """One command line of the demo and how its JSON document is summed up in a line or two."""

    arguments: tuple[str, ...]
    summary: Callable[[dict[str, Any]], str]

    def __str__(self) -> str:
        return shlex.join(("kvtune", *self.arguments))


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")] = Path("demo"),
    overwrite: Overwrite = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Walk the whole line on a packaged model: capture, analyze, simulate, live, tune, export."""
    output = Output(json=json, quiet=quiet)
    if out.exists() and not overwrite:
        raise InputError(f"{out} exists already", "give another --out, or --overwrite")
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    results = []
    for step in steps(out, overwrite):
        output.line(f"$ {step}")
        begun = time.perf_counter()
        document = _run(step, quiet)
        seconds = time.perf_counter() - begun
        for line in step.summary(document).splitlines():
            output.line(f"  {line}")
        output.line(f"  ({seconds_text(seconds)})")
        results.append({"command": str(step), "seconds": round(seconds, 3), "result": document})
    profile, report = out / "study" / "profile.yaml", out / "analysis" / "report.html"
    document = {
        "folder": str(out),
        "profile": str(profile),
        "report": str(report),
        "seconds": round(time.perf_counter() - started, 3),
        "steps": results,
    }

    def human(shown: Output) -> None:
        shown.line()
        shown.line(f"profile  {profile}")
        shown.line(f"report   {report}  (open it in a browser)")
        shown.line(f"exports  {', '.join(str(out / engine) for engine in ENGINES)}")
        shown.line(f"all in   {seconds_text(document['seconds'])}")

    output.result(document, human)
    output.closing(out, f"kvtune profile show {shlex.quote(str(profile))}")


def steps(out: Path, overwrite: bool) -> list[Step]:
    """The command lines, in order; those that write a folder replace it where ``overwrite`` says so."""
    path = {name: shlex.quote(str(out / name)) for name in ("niah.trace", "code.trace", "analysis", "study")}
    code, study = path["code.trace"], path["study"]
    profile = shlex.quote(str(out / "study" / "profile.yaml"))
    code_search = f"{MODEL} --task code_search --context 2048"
    lines: list[tuple[Callable[[dict[str, Any]], str], str]] = [
        (
            _capture,
            f"capture {MODEL} --task niah_single --context 1024 --samples 2 --out {path['niah.trace']}",
        ),
        (_capture, f"capture {code_search} --samples 3 --out {code}"),
        (_analyze, f"analyze {code} --out {path['analysis']}"),
        (_simulate, f"simulate {code} --budgets {BUDGETS}"),
        (_tune, f"tune {code} --trials 20 --out {study}"),
        (_live, f"live {code_search} --samples 2 --no-free --profile {profile}"),
    ]
    for engine in ENGINES:
        folder = shlex.quote(str(out / engine))
        lines.append((_export, f"profile export {profile} --engine {engine} --out {folder}"))
    return [
        Step((*shlex.split(line), *(("--overwrite",) if overwrite and " --out " in line else ())), summary)
        for summary, line in lines
    ]


def _run(step: Step, quiet: bool) -> dict[str, Any]:
    """Run a command line in json mode and give its document; its notes and progress go their way."""
    said = io.StringIO()
    with redirect_stdout(said):
        invoke([*step.arguments, "--json", *(("--quiet",) if quiet else ())])
    return json_text.loads(said.getvalue())


def _capture(found: dict[str, Any]) -> str:
    scores = ", ".join(f"{task} {cell(score)}" for task, score in found["score"].items() if score is not None)
    return (
        f"{found['samples']} samples, {found['tokens']:,} tokens, {found['decode_steps']:,} decode steps, "
        f"{bytes_text(found['bytes'])}; score: {scores or 'none'}"
    )


def _analyze(found: dict[str, Any]) -> str:
    cosine, overlap = found["query_cosine"]["lag1"]["mean"], found["overlap_at_100"]["lag1"]["mean"]
    error, reads = found["output_error"], bytes_text(found["read_bytes_per_step"])
    return (
        f"one step to the next: query cosine {cell(cosine)}, top-100 overlap {cell(overlap)}\n"
        f"wave_index as shipped: output error {cell(error['mean'])} (p95 {cell(error['p95'])}), "
        f"mass {cell(found['attention_mass']['mean'])}, reads {reads} a step"
    )


def _simulate(found: dict[str, Any]) -> str:
    curve = ", ".join(f"{row['budget']:.0%}: {cell(row['hit_ratio']['page'])}" for row in found["curve"])
    return f"page hit ratio by cache size: {curve}"


def _tune(found: dict[str, Any]) -> str:
    held = found["held_out"]
    lines = []
    for who in ("chosen", "default"):
        error = held[who]["output_error"]
        reads = bytes_text(held[who]["read_bytes_per_step"])
        lines.append(f"held out, {who}: output error {cell(error['mean'])}, reads {reads} a step")
    verdict = {"tie": "neither wins", "chosen": "the choice wins", "default": "the shipped defaults win"}
    return "\n".join([*lines, f"{verdict[held['winner']]}; {found['trials']['complete']} trials"])


def _live(found: dict[str, Any]) -> str:
    nll = found["delta_nll"]
    equal = {True: "equal", False: "NOT equal", None: "nothing to compare"}[found["replay_equal"]]
    interval = f"[{cell(nll['low'])}, {cell(nll['high'])}]"
    return (
        f"KL to full attention {cell(found['kl']['mean'])}, "
        f"ΔNLL {cell(nll['mean'])} {interval}, top-1 {found['top1']:.1%}\n"
        f"page hit ratio {cell(found['hit_ratio']['page'])}; the simulator's replay: {equal}"
    )


def _export(found: dict[str, Any]) -> str:
    lost = len(found["not_expressible"])
    told = "every setting expressed" if not lost else f"{lost} settings not expressible (listed)"
    return f"{found['engine']} {found['engine_version']}: {len(found['files'])} files, {told}"
