"""``kvtune simulate --hardware``: what a decode step costs on a machine, told below the hit ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtune.commands.options import refuse_given
from kvtune.commands.output import Output, bytes_text, cell
from kvtune.errors import InputError

if TYPE_CHECKING:
    from kvtune.caching import CacheResult
    from kvtune.hardware import Demand, Hardware
    from kvtune.traces import Trace

LABELS = {
    "scan": "index scan",
    "choose": "top-k",
    "id_copy": "id copy",
    "estimate": "estimation",
    "lookup": "cache lookup",
    "fetch": "miss transfer",
    "attend": "exact attention and merge",
    "update": "cache scatter",
    "append": "new key and value",
    "fixed": "fixed, by layer",
    "projections": "projections and MLP",
    "launches": "launches",
}
"""The cost model's terms as the table names them, in its order."""


@dataclass(frozen=True)
class HardwareOptions:
    """The options that go with ``--hardware``; ``None``: not given."""

    batch: int | None
    offload: str | None
    parameters: float | None

    def refuse(self) -> None:
        """``InputError`` for one that is given without ``--hardware``."""
        refuse_given(vars(self), "--hardware")

    def machine(self, name_or_path: str) -> Hardware:
        """The machine asked for. ``InputError`` for options that cannot be, before a trace is read."""
        from kvtune.hardware.cost import check_offload
        from kvtune.profiles.hardware_presets import load_hardware

        hardware = load_hardware(name_or_path)
        if self.batch is not None and self.batch < 1:
            raise InputError(f"--batch must be 1 or more, not {self.batch}")
        if self.parameters is not None and not self.parameters > 0:
            raise InputError(f"--parameters must be above 0, not {self.parameters:g}")
        if self.offload is not None:
            check_offload(hardware, self.offload)
        return hardware


def add_prediction(
    document: dict[str, Any],
    hardware: Hardware,
    options: HardwareOptions,
    trace: Trace,
    demand: Demand,
    curve: Sequence[CacheResult],
) -> None:
    """Put step, largest batch and throughput into each row of the curve, and what they rest on beside it."""
    from kvtune.hardware import predict, weights_bytes

    weights, source = weights_bytes(trace, options.parameters)
    predicted = predict(
        hardware, demand, curve, weights_bytes=weights, batch=options.batch or 1, offload=options.offload
    )
    for row, step in zip(document["curve"], predicted.pop("rows")):
        row.update(step)
    source_of = hardware.source.model_dump(mode="json", exclude_none=True)
    document["hardware"] = {"name": hardware.name, "device": hardware.device, "source": source_of}
    document["dtype"] = trace.geometry.dtype
    document["weights"] = {"bytes": weights, "source": source}
    document.update(predicted)


def show_prediction(output: Output, document: Mapping[str, Any]) -> None:
    """The steps by budget, the terms at the largest, and what they mean."""
    curve, largest = document["curve"], document["curve"][-1]
    output.line(_header(document))
    output.table(
        ["budget", "step ms", "tokens/s", "max batch", "GPU bytes of a sequence", "bound by"],
        [
            [
                f"{row['budget']:.3g}",
                row["step"]["total_ms"],
                row["tokens_per_second"],
                row["max_batch"],
                bytes_text(row["gpu_bytes"]["total"]),
                row["step"]["bound_by"],
            ]
            for row in curve
        ],
        title="one decode step by cache budget",
    )
    show_terms(output, largest["step"], f"terms at a budget of {largest['budget']:.3g}")
    output.line(_closing(document, largest))


def show_terms(
    output: Output, step: Mapping[str, Any], title: str, measured: Mapping[str, float] | None = None
) -> None:
    """The terms of a step that occur: ``total_ms, terms{…}, hidden_ms`` and, if known, ``bytes{…}``.

    ``measured``: milliseconds by term, to stand beside; all that is no stage of attention is ``model``.
    """
    moved = step.get("bytes")
    if measured:
        _show_beside(output, step, title, {**measured, "projections": measured.get("model", 0.0)})
        return
    rows = [
        [label, _ms(step["terms"][term]), *([] if moved is None else [_bytes(moved[term])])]
        for term, label in LABELS.items()
        if step["terms"][term]
    ]
    blank = [] if moved is None else [""]
    if step["hidden_ms"]:
        rows.append(["side by side with another term", f"-{_ms(step['hidden_ms'])}", *blank])
    rows.append(["step", _ms(step["total_ms"]), *blank])
    output.table(["term", "ms", *([] if moved is None else ["bytes"])], rows, title=title)


def _show_beside(output: Output, step: Mapping[str, Any], title: str, measured: Mapping[str, float]) -> None:
    """Terms predicted beside those measured, as kernels of one step."""
    rows: list[list[Any]] = [
        [label, *(_ms(terms[term]) if terms.get(term) else "" for terms in (measured, step["terms"]))]
        for term, label in LABELS.items()
        if step["terms"][term] or measured.get(term)
    ]
    rows.append(["side by side with another term", "", f"-{_ms(step['hidden_ms'])}"])
    rows.append(["step", _ms(step["measured_ms"]), _ms(step["total_ms"])])
    output.table(["term", "measured ms", "predicted ms"], rows, title=title)


def _header(document: Mapping[str, Any]) -> str:
    hardware, weights = document["hardware"], document["weights"]
    where = "KV in host memory" if document["offload"] == "cpu" else "KV on the device"
    return (
        f"On {hardware['name']} ({hardware['source']['kind']}): batch {document['batch']}, "
        f"{document['tokens']:,.0f} tokens, {document['dtype']}, {where}, "
        f"{bytes_text(weights['bytes'])} of weights ({weights['source']})"
    )


def _closing(document: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Which resource saturates, what fits, what full attention would cost, and where the policy pays."""
    step, full, batch = row["step"], document["full"], document["batch"]
    room = (
        "" if row["max_batch"] >= batch else f" (but batch {batch} does not fit: at most {row['max_batch']})"
    )
    name = document["policy"]["name"]
    return (
        f"{_sentence_case(step['bound_by'])} bounds the step ({step['shares'][step['bound_by']]:.0%} of it)"
        f"{room}; full attention would take {cell(full['step']['total_ms'])} ms with at most "
        f"{full['max_batch']:,} sequences, so {name} {_verdict(document, step, full['step'])}."
    )


def _verdict(document: Mapping[str, Any], step: Mapping[str, Any], full: Mapping[str, Any]) -> str:
    speedup = full["total_ms"] / step["total_ms"]
    here = f"is {speedup:.2f}x as fast here"
    row = next(row for row in document["break_even"] if row["batch"] == document["batch"])
    pays = [r["batch"] for r in document["break_even"] if r["context"] is not None]
    if row["context"] == round(document["tokens"]):
        return here
    if row["context"] is not None:
        return f"{here} and pays from {row['context']:,} tokens on at this batch"
    return f"{here}" + (f" and pays from batch {min(pays)} on" if pays else " and pays nowhere")


def _sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def _ms(value: float) -> str:
    return f"{value:.4f}" if value < 1 else f"{value:.3f}"


def _bytes(count: float) -> str | None:
    return bytes_text(count) if count else None
