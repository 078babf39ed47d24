"""``kvtune analyze --compare``: policies side by side, each where it reads the same bytes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtune.commands.options import parse_layers, refuse_given
from kvtune.commands.output import Output
from kvtune.commands.sensitivity import parse_names
from kvtune.errors import InputError

if TYPE_CHECKING:
    from kvtune.policies.base import Policy
    from kvtune.traces import Trace


@dataclass(frozen=True)
class ComparisonOptions:
    """The options that only ``--compare`` reads; ``None``: not given."""

    read_bytes: float | None
    live: int | None

    def refuse(self) -> None:
        """``InputError`` for one that is given without ``--compare``."""
        refuse_given(vars(self), "--compare")


def analyze_comparison(
    trace: Path,
    policies: str,
    settings: Mapping[str, Any],
    options: ComparisonOptions,
    layers: str | None,
    folder: Path,
    overwrite: bool,
    device: str,
    seed: int,
    output: Output,
) -> None:
    """Measure, write ``compare.json`` and ``compare.html`` into ``folder``, and show the table."""
    by_policy = split_settings(settings)

    from kvtune import open_trace
    from kvtune.analysis.compare import DOCUMENT, PAGE, compare

    opened = open_trace(trace, verify=True)
    document = compare(
        opened,
        parse_names(policies),
        by_policy,
        None if layers is None else parse_layers(layers, opened.geometry.n_layers),
        options.read_bytes,
        out=folder,
        overwrite=overwrite,
        device=device,
        seed=seed,
        live=None if options.live is None else _live(opened, options.live, seed, output),
        progress=output.progress,
    )
    document["files"] = {"compare": str(folder / DOCUMENT), "report": str(folder / PAGE)}
    output.result(document, lambda out: _human(out, document))
    equal = [row["name"] for row in document["policies"] if row["matched"] and not row["reference"]]
    best = f" --policy {equal[0]}" if equal else ""
    output.closing(folder, f"kvtune tune {shlex.quote(str(trace))}{best}")


def split_settings(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """``{"quest.page_size": 8}`` as ``{"quest": {"page_size": 8}}``; ``InputError`` for a bare key."""
    split: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        policy, dot, parameter = key.partition(".")
        if not dot:
            raise InputError(
                f"--set {key}: with --compare a parameter is named with its policy",
                f"write it like --set quest.{key}={value}",
            )
        split.setdefault(policy, {})[parameter] = value
    return split


def _live(trace: Trace, samples: int, seed: int, output: Output) -> Callable[[Policy], Mapping[str, Any]]:
    """Measures a policy on the trace's own model, loaded when it is first asked."""
    from kvtune.runtime.traced import TracedRuns

    return TracedRuns(trace, samples, seed, output.progress)


def _human(output: Output, document: dict[str, Any]) -> None:
    from kvtune.analysis.comparison_page import findings
    from kvtune.analysis.report import subtitle
    from kvtune.analysis.text import number, percent, size, tokens

    output.line(f"{document['model']}: {subtitle(document)}")
    output.line()
    live = any("kl" in row for row in document["policies"])
    full = document["full_read_bytes_per_step"]
    columns = ["policy", "error", "p95", "mass", "recall", "tokens", "bytes", "scan", "index", "build"]
    rows = [
        [
            row["name"],
            number(row["output_error"]["mean"]),
            number(row["output_error"]["p95"]),
            percent(row["attention_mass"]["mean"]),
            percent(row["recall_at_100"]["attention"]),
            tokens(row["effective_tokens"]),
            percent(row["read_bytes_per_step"] / full),
            size(row["scan_bytes"]),
            size(row["index_bytes"]),
            f"{row['build_seconds']:.2f} s",
            *([number(row.get("kl", {}).get("mean"))] if live else []),
        ]
        for row in document["policies"]
    ]
    title = "Policies at equal read bytes (share of full attention's), by mean output error"
    output.table([*columns, *(["live KL"] if live else [])], rows, title=title)
    for sentence in findings(document):
        output.line(sentence)
    output.line(f"Plots and all parameters: {document['files']['report']}")
