"""``kvtune tune``: search a policy's settings on a trace, and check the choice on samples held out."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtune.commands.errors import kept
from kvtune.commands.options import (
    Device,
    JsonFlag,
    Layers,
    OutPath,
    Overwrite,
    QuietFlag,
    Resume,
    Seed,
    parse_layers,
    parse_settings,
)
from kvtune.commands.output import Output, bytes_text, cell
from kvtune.errors import InputError

PROFILE = "profile.yaml"


def tune(
    trace: Annotated[Path, typer.Argument(help="Trace folder written by 'kvtune capture'.")],
    policy: Annotated[str, typer.Option("--policy", help="Policy to tune.")] = "wave_index",
    trials: Annotated[
        int, typer.Option("--trials", help="Trials in all, those of earlier runs included.")
    ] = 40,
    max_error: Annotated[
        float | None, typer.Option("--max-error", help="Largest mean output error allowed.")
    ] = None,
    max_read_bytes: Annotated[
        float | None,
        typer.Option(
            "--max-read-bytes", help="Most bytes read per step (default: what the shipped default reads)."
        ),
    ] = None,
    min_hit_ratio: Annotated[
        float | None, typer.Option("--min-hit-ratio", help="Smallest page hit ratio allowed.")
    ] = None,
    held_out: Annotated[
        float, typer.Option("--held-out", help="Share of the samples kept out of the search.")
    ] = 0.34,
    uniform: Annotated[bool, typer.Option("--uniform", help="Same budget in every layer.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Hold a parameter at a value, like spread_correction=0."
        ),
    ] = None,
    layers: Layers = None,
    device: Device = "auto",
    seed: Seed = 0,
    out: OutPath = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Search settings on most samples of a trace; compare the choice with the defaults on the others.

    Writes profile.yaml and the study to --out (default: TRACE-study, beside the trace).
    """
    folder = out or trace.resolve().with_name(f"{trace.resolve().name}-study")
    output = Output(json=json, quiet=quiet)

    import kvtune
    from kvtune.profiles import save_profile
    from kvtune.profiles.tuned import profile_of
    from kvtune.tuning import Constraints

    limits = Constraints(max_error, max_read_bytes, min_hit_ratio)
    opened = kvtune.open_trace(trace, verify=True)
    wanted = None if layers is None else parse_layers(layers, opened.geometry.n_layers)
    _make_room(folder, resume, overwrite)
    with kept(lambda: f"finished trials are kept in '{folder}': continue with --resume"):
        result = kvtune.tune(
            opened,
            folder,
            policy=policy,
            trials=trials,
            constraints=limits,
            held_out=held_out,
            layers=wanted,
            per_layer=not uniform,
            fixed=parse_settings(set_),
            device=device,
            seed=seed,
            progress=output.progress,
        )
    path = save_profile(profile_of(result, opened, seed), folder / PROFILE, overwrite=True)
    document = {"profile": str(path), **result.document}
    output.result(document, lambda shown: _human(shown, document))
    output.closing(path, f"kvtune profile show {shlex.quote(str(path))}")


def _make_room(folder: Path, resume: bool, overwrite: bool) -> None:
    """Refuse an existing folder unless told what to do; overwriting removes only what a study wrote."""
    from kvtune.tuning.tune import JOURNAL

    if not folder.exists():
        return
    if folder.is_file():
        raise InputError(f"'{folder}' is a file, not a folder")
    if overwrite:
        for name in (JOURNAL, PROFILE):
            (folder / name).unlink(missing_ok=True)
        for lock in folder.glob(f"{JOURNAL}.*"):
            shutil.rmtree(lock) if lock.is_dir() else lock.unlink()
    elif not resume and any(folder.iterdir()):
        raise InputError(
            f"'{folder}' exists already", "continue it with --resume, or replace it with --overwrite"
        )


def _human(output: Output, document: dict[str, Any]) -> None:
    held = document["held_out"]
    rows = []
    for what, part in (("search", document), ("held out", held)):
        for who in ("default", "chosen"):
            row = part[who]
            rows.append(
                [
                    what,
                    "shipped default" if who == "default" else "chosen",
                    row["output_error"]["mean"],
                    row["output_error"]["p95"],
                    bytes_text(row["read_bytes_per_step"]),
                    row["hit_ratio"],
                ]
            )
    columns = ["samples", "setting", "mean error", "p95 error", "read/step", "page hits"]
    output.table(columns, rows, title="output error against full attention")
    params = document["chosen"]["params"]
    plain = {k: v for k, v in params.items() if k != "overrides" and v != ""}
    output.line("chosen: " + ", ".join(f"{key} {_short(value)}" for key, value in plain.items()))
    if params.get("overrides"):
        output.line(f"budgets differ in {len(params['overrides'])} layers (see the profile)")
    output.line(verdict_line(held))
    counted = document["trials"]
    output.line(
        f"{counted['complete']} trials complete, {counted['pruned']} pruned, {counted['failed']} failed"
    )


def verdict_line(held: dict[str, Any]) -> str:
    """Who wins on the held-out samples, with the size of the difference."""
    chosen, default = (held[who]["output_error"] for who in ("chosen", "default"))
    interval = f"difference of means {cell(held['difference']['value'])}"
    interval += f" [{cell(held['difference']['low'])}, {cell(held['difference']['high'])}]"
    change = {name: (chosen[name] / default[name] - 1 if default[name] else 0.0) for name in ("mean", "p95")}
    size = f"mean error {change['mean']:+.0%}, p95 {change['p95']:+.0%}; {interval}"
    if held["winner"] == "chosen":
        return f"Held out, the chosen setting wins at no more read bytes: {size}."
    if held["winner"] == "default":
        return f"Held out, the shipped defaults win: {size}. Keep them."
    return f"Held out, neither wins clearly: {size}."


def _short(value: Any) -> str:
    return (
        cell(value) if not isinstance(value, list) else ("none" if not value else ",".join(map(str, value)))
    )
