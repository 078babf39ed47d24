"""``kvtune doctor``: what is installed, what the machine offers, and what would make a command fail."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from kvtune.commands.errors import FAILED
from kvtune.commands.options import JsonFlag, QuietFlag
from kvtune.commands.output import Output, bytes_text


def doctor(json: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """Check the installation: versions, GPU, Faiss, packaged models, disk and memory.

    Exits with 1 where it finds a problem.
    """
    from kvtune.commands import machine

    output = Output(json=json, quiet=quiet)
    versions, problems = machine.packages()
    device, of_device = machine.device()
    faiss, of_faiss = machine.faiss_build()
    models, cache, of_models = machine.models()
    here, of_here = machine.folder(Path.cwd(), "the current folder")
    memory, of_memory = machine.memory()
    problems += of_device + of_faiss + of_models + of_here + of_memory
    document = {
        "versions": versions,
        "device": device,
        "faiss": faiss,
        "models": models,
        "cache": cache,
        "current_folder": here,
        "memory": memory,
        "cores": machine.cores(),
        "problems": [asdict(problem) for problem in problems],
    }
    output.result(document, lambda out: _human(out, document))
    if problems:
        raise typer.Exit(FAILED)


def _human(output: Output, document: dict[str, Any]) -> None:
    rows = [(name, version or "missing") for name, version in document["versions"].items()]
    output.table(("package", "version"), [row for row in rows if row != ("triton", "missing")])
    device, faiss, memory = document["device"], document["faiss"], document["memory"]
    gpus = ", ".join(f"{gpu['name']} ({bytes_text(gpu['memory_bytes'])})" for gpu in device["gpus"])
    rows = [
        ("torch runs on", gpus or device["torch"] or "missing"),
        ("CUDA build", device["cuda"] or "no"),
        ("Faiss", f"{faiss['version']}, {faiss['build']} build" if faiss["version"] else "missing"),
        ("cores", document["cores"]),
        ("memory", f"{_size(memory['available_bytes'])} available of {_size(memory['total_bytes'])}"),
        ("model cache", _folder(document["cache"])),
        ("current folder", _folder(document["current_folder"])),
    ]
    rows += [(f"model {model['name']}", _model(model)) for model in document["models"]]
    output.table(("machine", ""), rows)
    if not document["problems"]:
        output.line("No problems found.")
    for problem in document["problems"]:
        output.line(f"problem: {problem['problem']}")
        output.line(f"   hint: {problem['hint']}")
    output.closing(None, None if document["problems"] else "kvtune demo")


def _model(model: dict[str, Any]) -> str:
    if not model["installed"]:
        return f"not installed ({model['install']})"
    return "installed, converted" if model["converted"] else "installed, converted on first use"


def _folder(folder: dict[str, Any] | None) -> str:
    return "unknown" if folder is None else f"{folder['folder']} ({bytes_text(folder['free_bytes'])} free)"


def _size(count: int | None) -> str:
    return "?" if count is None else bytes_text(count)
