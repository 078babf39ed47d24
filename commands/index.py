"""``kvtune index``: build, inspect and measure searchable indexes of a trace's keys."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtune.commands.options import (
    Device,
    JsonFlag,
    Layers,
    OutPath,
    Overwrite,
    QuietFlag,
    Seed,
    parse_indices,
    parse_layers,
    parse_settings,
)
from kvtune.commands.output import Output, bytes_text, seconds_text
from kvtune.errors import InputError

if TYPE_CHECKING:
    from kvtune.indexing import IndexFolder
    from kvtune.traces import Trace

app = typer.Typer(help="Build, inspect and measure indexes of a trace's keys.", no_args_is_help=True)

TraceFolder = Annotated[
    Path, typer.Argument(metavar="TRACE", help="Trace folder written by 'kvtune capture'.")
]
Kind = Annotated[str, typer.Option("--kind", help="flat, ivf, hnsw or pq (Faiss), or kmeans (kvtune's own).")]
Metric = Annotated[str, typer.Option("--metric", help="inner_product (what attention ranks by) or l2.")]
Parameters = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An index parameter (repeatable).")
]
Samples = Annotated[str | None, typer.Option("--samples", help="Samples to use, like 0,2-3 (default: all).")]
Timelines = Annotated[
    str | None, typer.Option("--timelines", help="Timelines of each sample to use, like 0 (default: all).")
]


@app.command()
def build(
    trace: TraceFolder,
    kind: Kind = "ivf",
    set_: Parameters = None,
    metric: Metric = "inner_product",
    layers: Layers = None,
    samples: Samples = None,
    timelines: Timelines = None,
    device: Device = "auto",
    seed: Seed = 0,
    out: OutPath = None,
    overwrite: Overwrite = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Index the prompt's keys, one index per sample, timeline, layer and kv head.

    Writes a folder (default: TRACE-KIND-index, beside the trace).
    """
    output = Output(json=json, quiet=quiet)
    settings = parse_settings(set_)

    import kvtune
    from kvtune.clustering.key_index import IndexSpec
    from kvtune.indexing import build_index

    spec = IndexSpec.of(kind, settings, metric)
    opened = kvtune.open_trace(trace, verify=True)
    folder = out or trace.resolve().with_name(f"{trace.resolve().name}-{kind}-index")
    document = build_index(
        opened,
        folder,
        spec,
        **_chosen(opened, layers, samples, timelines),
        device=device,
        seed=seed,
        overwrite=overwrite,
        progress=output.progress,
    )

    def human(out: Output) -> None:
        out.line(
            f"{document['indexes']} {kind} indexes of {document['keys']:,} keys, "
            f"{bytes_text(document['structure_bytes'])} on top of the keys, "
            f"built in {seconds_text(document['build_seconds'])}"
        )

    output.result({"trace": str(trace), **document}, human)
    _remark(output, document["notes"])
    output.closing(folder, f"kvtune index eval {shlex.quote(str(trace))} --index {shlex.quote(str(folder))}")


@app.command()
def show(
    index: Annotated[
        Path, typer.Argument(metavar="INDEX", help="Index folder written by 'kvtune index build'.")
    ],
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Show what an index folder holds, and check every file against its checksum."""
    from kvtune.indexing import open_index

    output = Output(json=json, quiet=quiet)
    opened = open_index(index)
    opened.verify()
    document = {"index": str(index), "verified": True, **opened.manifest}
    output.result(document, lambda out: _show(out, opened))


@app.command("eval")
def evaluate(
    trace: TraceFolder,
    kind: Kind = "ivf",
    set_: Parameters = None,
    metric: Metric = "inner_product",
    index: Annotated[
        Path | None, typer.Option("--index", help="Measure this saved index (not with --kind, --set).")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="NAME=V,V,...",
            help="Parameter and its values, like nprobe=1,2,4 or efSearch=100,200.",
        ),
    ] = None,
    layers: Layers = None,
    samples: Samples = None,
    timelines: Timelines = None,
    device: Device = "auto",
    seed: Seed = 0,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Print recall@100 against cost: every decode query searches the keys of its prompt."""
    output = Output(json=json, quiet=quiet)
    settings, wanted = parse_settings(set_), None if sweep is None else parse_sweep(sweep)
    if index is not None and (settings or kind != "ivf" or metric != "inner_product"):
        raise InputError("--index excludes --kind, --set and --metric: a saved index has its own")

    import kvtune
    from kvtune.clustering.key_index import IndexSpec
    from kvtune.indexing import open_index, recall_curve

    spec = None if index is not None else IndexSpec.of(kind, settings, metric)
    stored = None if index is None else open_index(index)
    opened = kvtune.open_trace(trace)
    document = recall_curve(
        opened,
        spec,
        wanted,
        stored=stored,
        **_chosen(opened, layers, samples, timelines),
        device=device,
        seed=seed,
        progress=output.progress,
    )
    document = {"trace": str(trace), "index": None if index is None else str(index), **document}
    output.result(document, lambda out: _curve(out, document))
    _remark(output, document["notes"])
    output.closing(None, f"kvtune analyze {shlex.quote(str(trace))} --policy retrieval_attention")


def parse_sweep(text: str) -> tuple[str, list[int]]:
    """``nprobe=1,2,4`` as a name and its values, each once, as given.

    Raises ``InputError`` for anything that is not a name and whole numbers.
    """
    name, equals, values = (part.strip() for part in text.partition("="))
    numbers = [value.strip() for value in values.split(",")]
    if not name or not equals or not all(n.isascii() and n.isdigit() for n in numbers):
        raise InputError(f"--sweep '{text}' is not NAME=V,V,...", "write it like --sweep nprobe=1,2,4")
    return name, list(dict.fromkeys(map(int, numbers)))


def _chosen(
    trace: Trace, layers: str | None, samples: str | None, timelines: str | None
) -> dict[str, list[int] | None]:
    most = max(len(list(trace.timelines(sample))) for sample in range(trace.n_samples))
    return {
        "layers": None if layers is None else parse_layers(layers, trace.geometry.n_layers),
        "samples": None
        if samples is None
        else parse_indices(samples, trace.n_samples, "--samples", "sample"),
        "timelines": None if timelines is None else parse_indices(timelines, most, "--timelines", "timeline"),
    }


def _show(output: Output, index: IndexFolder) -> None:
    manifest = index.manifest
    settings = ", ".join(f"{name}={value or 'auto'}" for name, value in manifest["parameters"].items())
    output.line(f"{manifest['kind']} index by {manifest['metric']} ({settings or 'no parameters'})")
    output.line(f"of {manifest['trace']['model']}, seed {manifest['seed']}; all checksums match")
    groups: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for unit, entry in index.entries.items():
        groups.setdefault(unit[:3], []).append(entry)
    rows = [
        (
            *group,
            len(entries),
            entries[0]["keys"],
            bytes_text(sum(entry["bytes"] for entry in entries)),
            bytes_text(sum(entry["structure_bytes"] for entry in entries)),
        )
        for group, entries in groups.items()
    ]
    output.table(("sample", "timeline", "layer", "kv heads", "keys", "on disk", "beside the keys"), rows)
    _remark(output, sorted({note for entry in index.entries.values() for note in entry["notes"]}))


def _curve(output: Output, document: dict[str, Any]) -> None:
    exact = document["exact"]
    output.line(
        f"{document['kind']} by {document['metric']}: {document['queries']:,} queries over "
        f"{document['keys']:,.0f} keys each; truth: top-{document['k']} by exact inner product"
    )
    name = document["curve"][0]["parameter"] or "index"
    rows = [
        (
            "as built" if row["value"] is None else row["value"],
            f"{row['recall_at_100']:.3f}",
            bytes_text(row["scan_bytes"]),
            f"{row['scan_bytes'] / exact['scan_bytes']:.1%}",
            f"{row['milliseconds']:.3f} ms",
        )
        for row in document["curve"]
    ]
    rows.append(
        ("exact", "1.000", bytes_text(exact["scan_bytes"]), "100.0%", f"{exact['milliseconds']:.3f} ms")
    )
    output.table((name, "recall@100", "scan/query", "of all keys", "time/query"), rows)


def _remark(output: Output, notes: list[str]) -> None:
    for note in notes:
        output.note(f"note: {note}")
