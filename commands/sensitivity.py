"""``kvtune analyze --sensitivity``: which heads suffer from which KV precision, and a mixed plan."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtune.commands.options import parse_layers, refuse_given
from kvtune.commands.output import Output

SHOWN_HEADS = 8


@dataclass(frozen=True)
class SensitivityOptions:
    """The options that only ``--sensitivity`` reads; ``None``: not given."""

    precisions: str | None
    native_share: float | None
    target_drop: float | None
    max_error: float | None

    def refuse(self) -> None:
        """``InputError`` for one that is given without ``--sensitivity``."""
        refuse_given(vars(self), "--sensitivity")


def analyze_sensitivity(
    trace: Path,
    options: SensitivityOptions,
    layers: str | None,
    folder: Path,
    overwrite: bool,
    device: str,
    seed: int,
    output: Output,
) -> None:
    """Measure, write ``sensitivity.json`` and ``sensitivity.html`` into ``folder``, and show both."""
    from kvtune import open_trace
    from kvtune.analysis.mixed_plan import MAX_ERROR, NATIVE_SHARE
    from kvtune.analysis.sensitivity import (
        DEFAULT_PRECISIONS,
        SENSITIVITY,
        SENSITIVITY_PAGE,
        sensitivity,
    )

    named = DEFAULT_PRECISIONS if options.precisions is None else parse_names(options.precisions)
    opened = open_trace(trace, verify=True)
    document = sensitivity(
        opened,
        named,
        None if layers is None else parse_layers(layers, opened.geometry.n_layers),
        native_share=NATIVE_SHARE if options.native_share is None else options.native_share,
        target_drop=options.target_drop,
        max_error=MAX_ERROR if options.max_error is None else options.max_error,
        out=folder,
        overwrite=overwrite,
        device=device,
        seed=seed,
        progress=output.progress,
    )
    document["files"] = {
        "sensitivity": str(folder / SENSITIVITY),
        "report": str(folder / SENSITIVITY_PAGE),
    }
    output.result(document, lambda out: _human(out, document))
    output.closing(folder, f"kvtune tune {shlex.quote(str(trace))}")


def parse_names(text: str) -> list[str]:
    """The names of a comma-separated list."""
    return [name for part in text.split(",") if (name := part.strip())]


def _human(output: Output, document: dict[str, Any]) -> None:
    from kvtune.analysis.sensitivity_page import parts_sentence, plan_sentence, precision_rows
    from kvtune.analysis.text import number

    plan = document["plan"]
    output.line(
        f"{document['model']}: {document['samples']} samples, {document['decode_steps']:,} decode steps"
    )
    output.line()
    output.table(
        ["precision", "bytes/token", "mean error", "p95", "keys alone", "values alone"],
        precision_rows(document),
        title="Output error of full attention, by KV precision (bytes of one head)",
    )
    ranked = [entry for entry in document["heads"] if entry["precision"] == plan["precision"]]
    native = {(entry["layer"], entry["kv_head"]) for entry in plan["native_heads"]}
    output.table(
        ["layer", "kv head", "error", "keys alone", "values alone", "in the plan"],
        [
            (
                entry["layer"],
                entry["kv_head"],
                *(number(entry[case]) for case in ("output_error", "keys", "values")),
                "native" if (entry["layer"], entry["kv_head"]) in native else plan["precision"],
            )
            for entry in ranked[:SHOWN_HEADS]
        ],
        title=f"Most sensitive of {len(ranked)} heads in {plan['precision']}",
    )
    output.line(f"{parts_sentence(document)}.")
    output.line(f"Plan: {plan_sentence(plan)}.")
    output.line(f"Heat maps by layer and head: {document['files']['report']}")
