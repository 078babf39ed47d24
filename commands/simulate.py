"""``kvtune simulate``: hit ratios and PCIe traffic of a block cache, predicted from a trace."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtune.commands.options import (
    JsonFlag,
    Layers,
    QuietFlag,
    Settings,
    parse_fractions,
    parse_layers,
    parse_settings,
)
from kvtune.commands.output import Output, bytes_text
from kvtune.commands.step_time import HardwareOptions, add_prediction, show_prediction

if TYPE_CHECKING:
    from kvtune.caching import CacheResult

_COLUMNS = ("budget", "slots", "page", "request", "token", "warm page", "transfer/step")


def simulate(
    trace: Annotated[Path, typer.Argument(help="Trace folder written by 'kvtune capture'.")],
    policy: Annotated[str, typer.Option("--policy", help="Policy whose accesses are cached.")] = "wave_index",
    set_: Settings = None,
    cache: Annotated[
        str, typer.Option("--cache", help="wave (RetroInfer's order), lru (plain), belady (ceiling).")
    ] = "wave",
    budgets: Annotated[
        str, typer.Option("--budgets", help="Cache sizes as fractions of the context's KV, in (0, 1].")
    ] = "0.01,0.02,0.05,0.1,0.2",
    layers: Layers = None,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="Also predict step times on a machine: h200, h100, ... or a file."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", help="With --hardware: sequences decoded at once (default: 1).")
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option("--offload", help="With --hardware: cpu (KV in host memory) or none (on the device)."),
    ] = None,
    parameters: Annotated[
        float | None,
        typer.Option("--parameters", help="With --hardware: the model's parameters, like 8e9."),
    ] = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Predict how often a GPU block cache would hit, and what misses would move over PCIe.

    With --hardware, also what a decode step takes there, term by term, and how many sequences fit
    ('kvtune calibrate' describes this machine).
    """
    fractions = parse_fractions(budgets, "--budgets")
    settings = parse_settings(set_)
    output = Output(json=json, quiet=quiet)
    options = HardwareOptions(batch, offload, parameters)
    if hardware is None:
        options.refuse()

    import kvtune
    from kvtune.caching import WARM_UP_STEPS, get_cache
    from kvtune.policies import get_policy

    title = get_cache(cache).title
    chosen = get_policy(policy, settings)
    machine = None if hardware is None else options.machine(hardware)
    opened = kvtune.open_trace(trace, verify=True)
    wanted = None if layers is None else parse_layers(layers, opened.geometry.n_layers)
    demand = None
    if machine is not None:
        from kvtune.hardware import measure_demand

        demand = measure_demand(opened, chosen, wanted, output.progress)
    source = opened if demand is None else demand.log
    curve = kvtune.simulate(source, fractions, cache, policy=chosen, layers=wanted, progress=output.progress)
    document = {
        "trace": str(trace),
        "policy": {"name": policy, "parameters": chosen.parameters()},
        "cache": {"name": cache, "title": title},
        "layers": sorted({layer for _, _, layer, _ in curve[0].units}),
        "units": curve[0].asking_units,
        "steps": curve[0].steps[0],
        "warm_up_steps": WARM_UP_STEPS,
        "curve": [result.to_dict() for result in curve],
    }
    if machine is not None and demand is not None:
        add_prediction(document, machine, options, opened, demand, curve)
    output.result(document, lambda out: _human(out, document, curve))


def _human(output: Output, document: dict[str, Any], curve: list[CacheResult]) -> None:
    output.line(f"{document['cache']['title']} under {document['policy']['name']}, {document['units']} units")
    output.table(_COLUMNS, [_row(result) for result in curve], title="hit ratio by cache budget")
    last = curve[-1]
    if not last.tally.accesses.any():
        output.line("The policy asks nothing of a cache here: every token it reads is resident.")
    else:
        output.line(f"Of the slots, {last.partial_page_waste:.0%} hold no wanted token (partial pages).")
        output.line(
            f"Hits count from an empty cache; warm: without the first {document['warm_up_steps']} steps."
        )
    if last.truncations:
        output.line(f"{last.truncations:,} blocks did not fit the execution buffer and were dropped.")
    if "hardware" in document:
        output.line()
        show_prediction(output, document)
    output.closing(None, f"kvtune tune {shlex.quote(document['trace'])}")


def _row(result: CacheResult) -> list[Any]:
    cold, warm = result.hit_ratio, result.warm_hit_ratio
    transfer = result.transfer_bytes_per_step
    traffic = None if math.isnan(transfer) else bytes_text(transfer)
    return [
        f"{result.budget:.3g}",
        result.page_slots,
        cold.page,
        cold.request,
        cold.token,
        warm.page,
        traffic,
    ]
