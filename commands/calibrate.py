"""``kvtune calibrate``: measure this machine for the cost model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtune.commands.options import Device, JsonFlag, Overwrite, QuietFlag
from kvtune.commands.output import Output, bytes_text, cell

if TYPE_CHECKING:
    from kvtune.hardware import Hardware


def calibrate(
    device: Device = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="YAML file to write (default: NAME.yaml).")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What to call the machine (default: the device's title).")
    ] = None,
    overwrite: Overwrite = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Measure this machine's bandwidths, latencies and stage constants, for 'kvtune simulate --hardware'.

    Takes about a minute on a GPU, most of it for compiling kernels. Without one, the device is the memory of
    the host.
    """
    output = Output(json=json, quiet=quiet)

    import kvtune
    from kvtune.hardware import save_hardware
    from kvtune.hardware.calibrate import default_name
    from kvtune.hardware.files import check_target

    path = Path(f"{name or default_name(device)}.yaml") if out is None else out
    check_target(path, overwrite)
    there = next(parent for parent in path.absolute().parents if parent.exists())
    hardware = kvtune.calibrate(device, name=name, folder=there, progress=output.progress)
    save_hardware(hardware, path, overwrite)
    output.result(hardware.model_dump(mode="json"), lambda shown: _human(shown, hardware))
    output.closing(path, f"kvtune simulate TRACE --hardware {shlex.quote(str(path))}")


def _human(output: Output, hardware: Hardware) -> None:
    output.line(f"{hardware.name}: {hardware.device}, {bytes_text(hardware.device_memory.bytes)}")
    output.table(["measure", "value", "note"], list(_rows(hardware)))
    rows = []
    for stage in type(hardware.stages).model_fields:
        fitted = None if stage == "estimation" else hardware.stages.get(stage)
        if fitted is not None:
            speed = rate(fitted.bytes_per_second)
            rows.append([stage, fitted.fixed_us, speed, fitted.ns_per_entry, _percent(fitted.worst_error)])
    if rows:
        output.table(["stage", "fixed us", "rate", "ns an entry", "worst error"], rows, title="fitted stages")


def _rows(hardware: Hardware) -> list[list[Any]]:
    memory, launch = hardware.device_memory, hardware.launch
    rows = [
        ["device reads", rate(memory.read_bytes_per_second), ""],
        ["device copies", rate(memory.copy_bytes_per_second), "read and written"],
        ["weights", rate(memory.weights_bytes_per_second), "as one token's products read them"],
    ]
    for found in memory.gather:
        note = "read and written"
        rows.append([f"device gathers of {found.row_bytes:,} B", rate(found.bytes_per_second), note])
    rows.append(["16-bit matrix products", f"{hardware.matmul_flops_per_second / 1e12:.4g} TFLOP/s", ""])
    link = hardware.host_to_device
    for kind, rates in (("pinned", link.pinned), ("pageable", link.pageable)) if link else ():
        for transfer in rates:
            what = f"host to device, {bytes_text(transfer.bytes)}"
            rows.append([what, rate(transfer.bytes_per_second), kind])
    rows.append(["host copies", rate(hardware.host.copy_bytes_per_second), "read and written"])
    rows.append(["disk reads", rate(hardware.disk.read_bytes_per_second if hardware.disk else None), ""])
    rows.append(["a kernel's launch", f"{cell(launch.kernel_us)} us", ""])
    if launch.graph_node_us is not None:
        rows.append(["a graph's node", f"{cell(launch.graph_node_us)} us", ""])
    rows.append(["a layer's overhead", f"{cell(launch.layer_overhead_us)} us", "without attention, weights"])
    rows.append(["a step's overhead", f"{cell(launch.step_overhead_us)} us", "beside its layers"])
    return rows


def rate(bytes_per_second: float | None) -> str | None:
    """Bytes per second as read in a table: ``4.28 TB/s``."""
    if bytes_per_second is None:
        return None
    for unit, size in (("TB/s", 1e12), ("GB/s", 1e9)):
        if bytes_per_second >= size:
            return f"{bytes_per_second / size:.4g} {unit}"
    return f"{bytes_per_second / 1e6:.4g} MB/s"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"
