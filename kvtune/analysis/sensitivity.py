"""``sensitivity``: which heads suffer from which KV precision, and which should stay native."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtune.analysis.checks import check_vectors, chosen_layers
from kvtune.analysis.document import provenance
from kvtune.analysis.head_errors import CASES, head_errors
from kvtune.analysis.mixed_plan import (
    MAX_ERROR,
    NATIVE_SHARE,
    Head,
    check_plan_options,
    mixed_plan,
    native_heads,
    propose,
)
from kvtune.analysis.output import check_absent, json_text, write_files
from kvtune.analysis.sensitivity_page import render_sensitivity
from kvtune.analysis.statistics import Distribution
from kvtune.devices import choose_device
from kvtune.errors import InputError
from kvtune.progress import Progress, silent
from kvtune.quantisation import PARTS, get_precision
from kvtune.traces import Trace, open_trace

DEFAULT_PRECISIONS = ("fp8", "int8", "int4", "kivi2")
SENSITIVITY, SENSITIVITY_PAGE = "sensitivity.json", "sensitivity.html"


def sensitivity(
    trace: Trace | str | Path,
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    layers: Iterable[int] | None = None,
    *,
    native_share: float = NATIVE_SHARE,
    target_drop: float | None = None,
    max_error: float = MAX_ERROR,
    out: str | Path | None = None,
    overwrite: bool = False,
    device: str = "cpu",
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Rank the kv heads of a trace by the output error of each KV precision, and propose a mixed plan.

    All decode steps of all samples attend every token they may see, with keys and values of one head held
    in the precision, and keys or values alone. ``native_share`` of the heads stay native in a plan, or,
    with ``target_drop``, as many as lower the mean error by that share. Of the precisions' plans the one
    with the fewest bytes is proposed whose mean error is at most ``max_error``.

    Returns ``precisions`` (by name: ``output_error`` with mean and p95, the same for ``keys`` and
    ``values`` alone, ``bytes_per_token`` of one head), ``heads`` (by precision, the most sensitive first:
    mean ``output_error``, and ``keys`` and ``values`` alone), ``plan`` (see
    :func:`~kvtune.analysis.mixed_plan.propose`) and provenance. With ``out``, that folder receives
    ``sensitivity.json`` and ``sensitivity.html``; ``overwrite`` replaces those two there. Vectors are moved
    to ``device`` (``cpu``, ``cuda``, ``auto``) layer by layer. ``seed`` drives the sample behind a p95 of
    very many values.

    Raises ``InputError`` for unknown precisions, layers or devices, a trace without values or decode steps
    and files that exist, ``TraceError`` for a damaged trace and for NaN or infinite vectors.
    """
    started = time.perf_counter()
    names = list(dict.fromkeys(precisions))
    if not names:
        raise InputError("no precision is chosen", f"like: {','.join(DEFAULT_PRECISIONS)}")
    for name in names:
        get_precision(name)
    check_plan_options(native_share, target_drop)
    place = choose_device(device)
    trace = trace if isinstance(trace, Trace) else open_trace(trace, verify=True)
    if not trace.has_values:
        raise InputError(f"the trace '{trace.path}' holds no values", "capture it without --no-values")
    chosen = chosen_layers(trace, layers)
    if out is not None:
        check_absent(Path(out), (SENSITIVITY, SENSITIVITY_PAGE), overwrite)
    errors = _measure(trace, names, chosen, seed, place, progress or silent)
    document = _document(trace, errors, native_share, target_drop, max_error)
    document["seed"], document["seconds"] = seed, round(time.perf_counter() - started, 3)
    if out is not None:
        _write(Path(out), document)
    return document


class _Errors:
    """Errors by (precision, case): over everything, and summed by layer and kv head."""

    def __init__(
        self, names: Sequence[str], layers: Sequence[int], kv_heads: Sequence[int], seed: int
    ) -> None:
        keys = [(name, case) for name in names for case in CASES]
        self.names, self.layers, self.kv_heads = names, layers, kv_heads
        self.all = {key: Distribution(seed=seed) for key in keys}
        self._sums = {key: np.zeros((len(layers), len(kv_heads))) for key in keys}
        self._count = np.zeros((len(layers), 1))
        self.steps = 0

    def add(self, layer: int, found: dict[tuple[str, str], NDArray[np.float64]]) -> None:
        """Errors [T, H, G] of one layer of one timeline."""
        row = self.layers.index(layer)
        for key, values in found.items():
            self.all[key].add(values)
            self._sums[key][row] += values.sum((0, 2))
        steps, _, group = next(iter(found.values())).shape
        self._count[row] += steps * group
        self.steps += steps if row == 0 else 0

    def by_head(self, name: str, case: str = "both") -> dict[Head, float]:
        """The mean error of every head."""
        means = self._sums[name, case] / self._count
        return {
            (layer, head): float(means[row, column])
            for row, layer in enumerate(self.layers)
            for column, head in enumerate(self.kv_heads)
        }

    def summary(self, name: str, case: str) -> dict[str, float]:
        return {"mean": self.all[name, case].mean, "p95": self.all[name, case].quantile(0.95)}


def _measure(
    trace: Trace,
    names: Sequence[str],
    layers: Sequence[int],
    seed: int,
    device: torch.device,
    progress: Progress,
) -> _Errors:
    errors = _Errors(names, layers, trace.kv_heads, seed)
    timelines = [
        timeline
        for sample in range(trace.n_samples)
        for timeline in trace.timelines(sample)
        if timeline.turns
    ]
    with progress.task("quantising", len(timelines) * len(layers)) as task:
        for timeline in timelines:
            for number in layers:
                layer = timeline.layer(number)
                check_vectors(layer)
                if bool(layer.decode.any()):
                    found = head_errors(layer.to(device), names, timeline.prompt_length)
                    errors.add(number, {key: value.double().cpu().numpy() for key, value in found.items()})
                task.advance(note=f"sample {timeline.sample}, layer {number}")
    if not errors.steps:
        raise InputError(
            f"the trace '{trace.path}' holds no decode steps", "capture it with --decode 1 or more"
        )
    return errors


def _document(
    trace: Trace, errors: _Errors, native_share: float, target_drop: float | None, max_error: float
) -> dict[str, Any]:
    native = _token_bytes(trace, "native")
    plans = []
    for name in errors.names:
        by_head = errors.by_head(name)
        kept = native_heads(by_head, native_share, target_drop)
        plans.append(mixed_plan(name, by_head, kept, native, _token_bytes(trace, name)))
    return {
        "trace": str(trace.path),
        "model": trace.model,
        "samples": trace.n_samples,
        "decode_steps": errors.steps,
        "layers": list(errors.layers),
        "kv_heads": list(errors.kv_heads),
        "precisions": {
            name: {
                "title": get_precision(name).title,
                "output_error": errors.summary(name, "both"),
                **{part: errors.summary(name, part) for part in PARTS},
                "bytes_per_token": _token_bytes(trace, name),
            }
            for name in errors.names
        },
        "heads": [entry for name in errors.names for entry in _ranked(errors, name)],
        "plan": {"target_drop": target_drop, **propose(plans, max_error)},
        "provenance": provenance(trace),
    }


def _ranked(errors: _Errors, name: str) -> list[dict[str, Any]]:
    """Every head in precision ``name``, the most sensitive first."""
    means = {case: errors.by_head(name, case) for case in CASES}
    return [
        {
            "layer": layer,
            "kv_head": head,
            "precision": name,
            "output_error": means["both"][layer, head],
            **{part: means[part][layer, head] for part in PARTS},
        }
        for layer, head in native_heads(means["both"], 1.0)
    ]


def _token_bytes(trace: Trace, name: str) -> float:
    """Bytes of one token's coded key and value in one kv head."""
    geometry, precision = trace.geometry, get_precision(name)
    dims = {"keys": geometry.head_dim, "values": geometry.value_dim}
    return sum(precision.token_bytes(dims[part], part, geometry.item_bytes) for part in PARTS)


def _write(folder: Path, document: dict[str, Any]) -> None:
    page, text = render_sensitivity(document), json_text(document)
    write_files(
        folder,
        {
            SENSITIVITY_PAGE: lambda path: path.write_text(page, encoding="utf-8"),
            SENSITIVITY: lambda path: path.write_text(text, encoding="utf-8"),
        },
    )
