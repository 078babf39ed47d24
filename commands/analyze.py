"""``kvtune analyze``: how local and concentrated attention is, and what a policy costs and loses."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtune.commands.options import (
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


def analyze(
    trace: Annotated[Path, typer.Argument(help="Trace folder written by 'kvtune capture'.")],
    policy: Annotated[str, typer.Option("--policy", help="Policy to evaluate on the trace.")] = "wave_index",
    set_: Settings = None,
    layers: Layers = None,
    out: OutPath = None,
    overwrite: Overwrite = False,
    seed: Seed = 0,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Measure locality and concentration of attention, and what a policy costs and loses.

    Writes summary.json, metrics.parquet and report.html to --out (default: TRACE-analysis, beside the trace).
    """
    settings = parse_settings(set_)
    output = Output(json=json, quiet=quiet)
    folder = default_out(trace) if out is None else out

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
        seed=seed,
        progress=output.progress,
    )
    files = {"summary": SUMMARY, "metrics": METRICS_TABLE, "report": REPORT}
    document["files"] = {kind: str(folder / name) for kind, name in files.items()}
    output.result(document, lambda out: _human(out, document))
    output.closing(folder, f"kvtune simulate {shlex.quote(str(trace))} --policy {policy}")


def default_out(trace: Path) -> Path:
    """``<trace>-analysis`` beside the trace folder."""
    named = trace if trace.name and trace.name != ".." else trace.resolve()
    return named.with_name(f"{named.name}-analysis")


def _human(output: Output, document: dict[str, Any]) -> None:
    from kvtune.analysis.report import subtitle, summary_rows
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
        title=f"Full attention, and {document['policy']['name']} against it",
    )
    verdicts = {True: "yes", False: "no", None: "unclear"}
    output.table(
        ["claim", "measured", "holds"],
        [(c["claim"], c["measured"], verdicts[c["holds"]]) for c in document["claims"]],
        title="Claims from the literature, on this trace",
    )
    output.line(f"Plots by lag, layer and head: {document['files']['report']}")
