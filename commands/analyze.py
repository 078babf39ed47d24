"""``kvtune analyze``: how local and concentrated attention is, and what a policy costs and loses."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtune.commands.comparison import ComparisonOptions, analyze_comparison
from kvtune.commands.options import (
    Device,
    JsonFlag,
    Layers,
    OutPath,
    Overwrite,
    QuietFlag,
    Seed,
    Settings,
    parse_layers,
    parse_settings,
)
from kvtune.commands.output import Output
from kvtune.commands.sensitivity import SensitivityOptions, analyze_sensitivity
from kvtune.errors import InputError


def analyze(
    trace: Annotated[Path, typer.Argument(help="Trace folder written by 'kvtune capture'.")],
    policy: Annotated[
        str | None, typer.Option("--policy", help="Policy to evaluate on the trace (default: wave_index).")
    ] = None,
    set_: Settings = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", help="KV precision that the policy works on: fp8, int8, int4, kivi2."),
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Rank heads by the error of KV precisions instead.")
    ] = False,
    precisions: Annotated[
        str | None,
        typer.Option("--precisions", help="With --sensitivity: what to try (default: fp8,int8,int4,kivi2)."),
    ] = None,
    native_share: Annotated[
        float | None,
        typer.Option("--native-share", help="With --sensitivity: share of heads kept native (default: 0.1)."),
    ] = None,
    target_drop: Annotated[
        float | None,
        typer.Option(
            "--target-drop", help="With --sensitivity: keep as many heads native as lower the error by this."
        ),
    ] = None,
    max_error: Annotated[
        float | None,
        typer.Option("--max-error", help="With --sensitivity: largest mean error of a plan (default: 0.1)."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option("--compare", help="Put policies side by side at equal read bytes: NAME,NAME."),
    ] = None,
    read_bytes: Annotated[
        float | None,
        typer.Option("--read-bytes", help="With --compare: bytes per step (default: what wave_index reads)."),
    ] = None,
    live: Annotated[
        int | None,
        typer.Option("--live", help="With --compare: samples to run on the model, for the KL to full."),
    ] = None,
    layers: Layers = None,
    device: Device = "auto",
    out: OutPath = None,
    overwrite: Overwrite = False,
    seed: Seed = 0,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Measure locality and concentration of attention, and what a policy costs and loses.

    Writes summary.json, metrics.parquet and report.html to --out (default: TRACE-analysis, beside the trace).
    With --sensitivity: how far each KV precision moves the output of each head, and which heads should stay
    native; writes sensitivity.json and sensitivity.html there. With --compare: what several policies lose
    where they read the same bytes (--set POLICY.KEY=VALUE); writes compare.json and compare.html there.
    """
    settings = parse_settings(set_)
    output = Output(json=json, quiet=quiet)
    folder = default_out(trace) if out is None else out
    options = SensitivityOptions(precisions, native_share, target_drop, max_error)
    comparison = ComparisonOptions(read_bytes, live)
    if sensitivity and compare is not None:
        raise InputError("--sensitivity and --compare exclude each other")
    if precision is not None and (sensitivity or compare is not None):
        raise InputError("--precision goes with one policy: leave out --compare and --sensitivity")
    if compare is not None:
        options.refuse()
        if policy is not None:
            raise InputError("--compare names its policies itself: leave out --policy")
        analyze_comparison(
            trace, compare, settings, comparison, layers, folder, overwrite, device, seed, output
        )
        return
    comparison.refuse()
    if sensitivity:
        if policy is not None or settings:
            raise InputError("--sensitivity measures full attention: leave out --policy and --set")
        analyze_sensitivity(trace, options, layers, folder, overwrite, device, seed, output)
        return
    options.refuse()

    import kvtune
    from kvtune.analysis.output import METRICS_TABLE, REPORT, SUMMARY, check_out

    opened = kvtune.open_trace(trace, verify=True)
    wanted = None if layers is None else parse_layers(layers, opened.geometry.n_layers)
    check_out(folder, overwrite)
    document = kvtune.analyze(
        opened,
        policy,
        settings,
        wanted,
        out=folder,
        overwrite=overwrite,
        precision=precision,
        device=device,
        seed=seed,
        progress=output.progress,
    )
    files = {"summary": SUMMARY, "metrics": METRICS_TABLE, "report": REPORT}
    document["files"] = {kind: str(folder / name) for kind, name in files.items()}
    output.result(document, lambda out: _human(out, document))
    named = document["policy"]["name"]
    output.closing(folder, f"kvtune simulate {shlex.quote(str(trace))} --policy {named}")


def default_out(trace: Path) -> Path:
    """``<trace>-analysis`` beside the trace folder."""
    named = trace if trace.name and trace.name != ".." else trace.resolve()
    return named.with_name(f"{named.name}-analysis")


def _human(output: Output, document: dict[str, Any]) -> None:
    from kvtune.analysis.report import policy_name, subtitle, summary_rows
    from kvtune.analysis.text import percent

    output.line(f"{document['model']}: {subtitle(document)}")
    output.line()
    by_lag = document["query_cosine"]
    if by_lag:
        overlap = document["overlap_at_100"]
        output.table(
            ["steps apart", *(key[3:] for key in by_lag)],
            [
                ["query cosine", *(f"{entry['mean']:.2f}" for entry in by_lag.values())],
                ["overlap@100", *(percent(entry["mean"]) for entry in overlap.values())],
                ["by chance", *(percent(entry["chance"]) for entry in overlap.values())],
            ],
            title="How alike decode steps are",
        )
    # The lag table has said what adjacent steps share.
    rows = [row for row in summary_rows(document) if "adjacent" not in row.measure]
    output.table(
        ["measure", "value", ""],
        [(row.measure, row.value, row.note) for row in rows],
        title=f"Full attention, and {policy_name(document)} against it",
    )
    verdicts = {True: "yes", False: "no", None: "unclear"}
    output.table(
        ["claim", "measured", "holds"],
        [(c["claim"], c["measured"], verdicts[c["holds"]]) for c in document["claims"]],
        title="Claims from the literature, on this trace",
    )
    output.line(f"Plots by lag, layer and head: {document['files']['report']}")
