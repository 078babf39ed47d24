"""What ``kvtune doctor`` looks at: packages, devices, Faiss, models, folders; and what is wrong with them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

_GIB = 2**30
_LITTLE_DISK = 2 * _GIB
_LITTLE_MEMORY = 3 * _GIB


@dataclass(frozen=True)
class Problem:
    """Something that will make a command fail, and what to do about it."""

    problem: str
    hint: str


def packages() -> tuple[dict[str, str | None], list[Problem]]:
    """Versions of kvtune and of what it requires (``None``: missing), and which do not fit."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    problems = []
    versions["kvtune"] = importlib.metadata.version("kvtune")
    for text in importlib.metadata.requires("kvtune") or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = requirement.name
        versions[name] = _version(name)
        if versions[name] is None:
            problems.append(Problem(f"{name} is not installed", f"pip install '{requirement}'"))
        elif not requirement.specifier.contains(versions[name] or "", prereleases=True):
            message = f"{name} {versions[name]} is too old: kvtune needs {requirement.specifier}"
            problems.append(Problem(message, f"pip install '{requirement}'"))
    versions["triton"] = _version("triton")
    return versions, problems


def device() -> tuple[dict[str, Any], list[Problem]]:
    """Torch's device, its CUDA build and the GPUs that it sees."""
    try:
        import torch
    except ImportError as error:
        return {"torch": None, "cuda": None, "gpus": []}, [_broken("torch", error)]
    gpus = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        gpus.append({"name": found.name, "memory_bytes": found.total_memory})
    document = {"torch": "cuda" if gpus else "cpu", "cuda": torch.version.cuda, "gpus": gpus}
    if gpus or shutil.which("nvidia-smi") is None:
        return document, []
    if torch.version.cuda is None:
        return document, [
            Problem("an NVIDIA driver is here, but torch is a CPU build", "install torch for CUDA")
        ]
    return document, [
        Problem("an NVIDIA driver is here, but torch sees no GPU", "look at what nvidia-smi says")
    ]


def faiss_build() -> tuple[dict[str, Any], list[Problem]]:
    """Faiss's version and whether it was built for the CPU or the GPU (imported after torch)."""
    try:
        import faiss
    except ModuleNotFoundError:
        hint = "pip install faiss-cpu (or faiss-gpu)"
        return {"version": None, "build": None}, [Problem("Faiss is not installed", hint)]
    except ImportError as error:
        return {"version": None, "build": None}, [_broken("faiss", error)]
    build = "gpu" if hasattr(faiss, "StandardGpuResources") else "cpu"
    options = faiss.get_compile_options().split()
    return {"version": faiss.__version__, "build": build, "options": options}, []


def models() -> tuple[list[dict[str, Any]], dict[str, Any] | None, list[Problem]]:
    """Packaged models, the cache of converted ones (``None``: kvtune.models does not load), problems."""
    try:
        from kvtune.models.cache import cache_folder
        from kvtune.models.catalog import CATALOG
        from kvtune.models.conversion import is_converted
    except ImportError as error:
        return [], None, [_broken("kvtune.models", error)]
    rows = []
    for model in CATALOG.values():
        path = model.find()
        converted = path is not None and is_converted(path)
        rows.append(
            {
                "name": model.name,
                "installed": not model.missing,
                "converted": converted,
                "install": model.install,
            }
        )
    cache, problems = folder(cache_folder(), "the model cache")
    return rows, cache, problems


def folder(path: Path, what: str) -> tuple[dict[str, Any], list[Problem]]:
    """Whether ``path`` can be written and what is free on its disk (it need not exist yet)."""
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    writable = os.access(there, os.W_OK)
    problems = []
    if not writable:
        problems.append(Problem(f"{what} {path} cannot be written", "set KVTUNE_CACHE to a folder that can"))
    if free < _LITTLE_DISK:
        problems.append(Problem(f"little is free on the disk of {what} {path}", "free some gigabytes there"))
    return {"folder": str(path), "writable": writable, "free_bytes": free}, problems


def memory() -> tuple[dict[str, Any], list[Problem]]:
    """Memory of the machine and what is available of it (``None`` where the system does not say)."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        total = None
    available = _available_memory()
    problems = []
    if available is not None and available < _LITTLE_MEMORY:
        problems.append(Problem("little memory is available", "close programs, or use a shorter --context"))
    return {"total_bytes": total, "available_bytes": available}, problems


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def _broken(package: str, error: ImportError) -> Problem:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return Problem(f"{package} cannot be imported: {reason}", f"reinstall {package.partition('.')[0]}")
