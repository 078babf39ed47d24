"""``kvtune profile``: show, validate, compare and export what tuning recommends."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtune.commands.options import JsonFlag, OutPath, Overwrite, QuietFlag
from kvtune.commands.output import Output, bytes_text, cell

if TYPE_CHECKING:
    from kvtune.profiles import Change, Profile, Resolved
    from kvtune.profiles.evidence import Interval, Measured
    from kvtune.profiles.exporters import Export

app = typer.Typer(help="Show, validate, compare and export profiles.", no_args_is_help=True)

ProfileFile = Annotated[
    Path, typer.Argument(metavar="PROFILE", help="Profile (YAML) written by 'kvtune tune'.")
]
Context = Annotated[
    int | None,
    typer.Option("--context", min=1, help="Context length in tokens (default: the longest it is tuned for)."),
]


@app.command()
def show(
    profile: ProfileFile, context: Context = None, json: JsonFlag = False, quiet: QuietFlag = False
) -> None:
    """Show a profile: its settings at one context length, what they should cost, and who says so."""
    from kvtune.profiles import load_profile

    output = Output(json=json, quiet=quiet)
    loaded = load_profile(profile)
    resolved = loaded.resolve(context or loaded.context_length.max)
    if resolved.extrapolated:
        output.note(f"note: the profile was not tuned for {resolved.context_length} tokens")
    document = {
        "profile": str(profile),
        "resolved": asdict(resolved),
        "content": loaded.model_dump(exclude_none=True),
    }
    output.result(document, lambda out: _show(out, profile, loaded, resolved))


@app.command()
def validate(
    profile: ProfileFile,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Trace that must be of the profile's model.")
    ] = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Check a profile: its form, its policy's parameters and, with --trace, the model's fingerprint."""
    from kvtune.profiles import load_profile
    from kvtune.profiles.checks import check_policy, check_trace

    output = Output(json=json, quiet=quiet)
    loaded = load_profile(profile)
    check_policy(loaded)
    if trace is not None:
        import kvtune

        check_trace(loaded, kvtune.open_trace(trace))
    document = {
        "profile": str(profile),
        "valid": True,
        "model": loaded.model.id,
        "fingerprint": loaded.model.fingerprint,
        "policy": loaded.policy.name,
        "trace": None if trace is None else str(trace),
    }

    def human(out: Output) -> None:
        matched = "" if trace is None else f", of the same model as {trace}"
        out.line(f"{profile} is valid: {loaded.policy.name} for {loaded.model.id}{matched}")

    output.result(document, human)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A profile.")],
    second: Annotated[Path, typer.Argument(help="Another profile.")],
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """List every key whose value differs between two profiles."""
    from kvtune.profiles import diff_profiles, load_profile

    output = Output(json=json, quiet=quiet)
    changes = diff_profiles(load_profile(first), load_profile(second))
    document = {
        "first": str(first),
        "second": str(second),
        "changes": [asdict(change) for change in changes],
    }
    output.result(document, lambda out: _differences(out, changes))


@app.command()
def export(
    profile: ProfileFile,
    engine: Annotated[str, typer.Option("--engine", help="Engine to write for, like retroinfer.")],
    engine_version: Annotated[
        str | None, typer.Option("--engine-version", help="Engine version (default: the newest known).")
    ] = None,
    context: Context = None,
    out: OutPath = None,
    overwrite: Overwrite = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Write an engine's configuration, and say which settings it cannot express."""
    from kvtune.profiles import load_profile
    from kvtune.profiles.exporters import export_profile, write_export

    output = Output(json=json, quiet=quiet)
    loaded = load_profile(profile)
    exported = export_profile(loaded, engine, engine_version, context)
    folder = out or profile.parent / f"{profile.stem}-{exported.engine}-{exported.engine_version}"
    paths = write_export(loaded, exported, folder, overwrite)
    length = exported.context_length
    if loaded.resolve(length).extrapolated:
        output.note(f"note: the profile was not tuned for {length} tokens")
    document = {
        "engine": exported.engine,
        "engine_version": exported.engine_version,
        "context_length": length,
        "files": [str(path) for path in paths],
        "not_expressible": [asdict(item) for item in exported.not_expressible],
    }
    output.result(document, lambda human: _exported(human, exported, paths))
    names = {"folder": str(folder), "model": loaded.model.basename}
    quoted = {name: shlex.quote(text) for name, text in names.items()}
    output.closing(folder, exported.usage.format(**quoted))


def _exported(output: Output, exported: Export, paths: list[Path]) -> None:
    output.line(f"{exported.engine} {exported.engine_version}, at {exported.context_length:,} tokens:")
    for path in paths:
        output.line(f"  {path}")
    lost = exported.not_expressible
    if not lost:
        output.line("Every setting of the profile is expressed.")
        return
    rows = [(item.setting, _value(item.value), item.reason) for item in lost]
    output.table(("setting", "value", "why"), rows, title="not expressible")


def _differences(output: Output, changes: list[Change]) -> None:
    if not changes:
        output.line("The profiles are equal.")
        return
    rows = [
        (
            change.key,
            _value(change.first),
            _value(change.second),
            None if change.ratio is None else f"{change.ratio:.3g}×",
        )
        for change in changes
    ]
    output.table(("key", "first", "second", "ratio"), rows)


def _show(output: Output, path: Path, profile: Profile, resolved: Resolved) -> None:
    from kvtune.profiles.exporters import engines_for

    lengths = profile.context_length
    tuned = f"{lengths.min:,}-{lengths.max:,} tokens"
    output.line(f"{profile.policy.name} for {profile.model.id}, tuned for {tuned}")
    rows = [("policy parameter", name, value) for name, value in resolved.parameters.items()]
    for layer, own in resolved.overrides.items():
        rows += [(f"layer {layer}", name, value) for name, value in own.items()]
    rows.append(("dense layers", "", profile.dense_layers))
    if profile.cache is not None:
        rows.append(("cache", profile.cache.policy, profile.cache.fraction))
    rows.append(("precision", "keys, values", f"{profile.kv_precision.keys}, {profile.kv_precision.values}"))
    table = [(kind, name, _value(value)) for kind, name, value in rows]
    title = f"settings at {resolved.context_length:,} tokens"
    output.table(("setting", "name", "value"), table, title=title)
    _evidence(output, profile)
    origin = profile.provenance.model_dump(exclude_none=True)
    output.line(f"From {', '.join(f'{name} {value}' for name, value in origin.items())}.")
    engine = engines_for(profile.policy.name)[0]
    output.closing(None, f"kvtune profile export {shlex.quote(str(path))} --engine {engine}")


def _evidence(output: Output, profile: Profile) -> None:
    predicted, held_out, live = profile.predicted, profile.held_out, profile.live
    if predicted is not None:
        rows = [
            ("output error, mean", _interval(predicted.output_error.mean)),
            ("output error, p95", _interval(predicted.output_error.p95)),
            ("read bytes per step", _interval(predicted.read_bytes_per_step, as_bytes=True)),
            ("hit ratio", _interval(predicted.hit_ratio)),
            ("transfer bytes per step", _interval(predicted.transfer_bytes_per_step, as_bytes=True)),
        ]
        present = [row for row in rows if row[1]]
        output.table(("predicted", f"value [{predicted.level:.0%} interval]"), present)
    if held_out is not None:
        rows = [("chosen", *_measured(held_out.chosen)), ("default", *_measured(held_out.default))]
        columns = ("held out", "mean error", "p95 error", "read bytes", "hit ratio")
        output.table(columns, rows)
        word = {"tie": "neither wins", "chosen": "the choice wins", "default": "the defaults win"}
        samples = "1 held-out sample" if held_out.samples == 1 else f"{held_out.samples} held-out samples"
        output.line(f"On {samples} {word[held_out.winner]}.")
    else:
        output.line("Not checked on held-out samples.")
    if live is not None:
        output.line(
            f"Live: KL {cell(live.kl.mean)}, ΔNLL {cell(live.delta_nll.mean)} "
            f"[{cell(live.delta_nll.low)}, {cell(live.delta_nll.high)}], top-1 {live.top1:.1%}."
        )


def _measured(measured: Measured) -> tuple[Any, ...]:
    error = measured.output_error
    return error.mean, error.p95, bytes_text(measured.read_bytes_per_step), measured.hit_ratio


def _interval(interval: Interval | None, as_bytes: bool = False) -> str:
    if interval is None:
        return ""
    form = bytes_text if as_bytes else cell
    if interval.low is None or interval.high is None:
        return form(interval.value)
    return f"{form(interval.value)} [{form(interval.low)}, {form(interval.high)}]"


def _value(value: Any) -> Any:
    """A setting as it reads in a table: lists in one line, a function as its formula."""
    if isinstance(value, dict) and "per_token" in value:
        return f"{cell(value['per_token'])} per token"
    if isinstance(value, list | tuple):
        return ", ".join(cell(item) for item in value) or "none"
    return value
