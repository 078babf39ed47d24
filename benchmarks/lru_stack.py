"""Plain LRU hit counts at 20 sizes: one pass of stack distances against libCacheSim once per size.

libCacheSim's Python package is under the GPL: it is installed into a virtual environment in a temporary
folder, run as a process of its own, and thrown away. Usage: python benchmarks/lru_stack.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import numpy as np
from record import best_seconds, record, table

from kvtune.caching.lru import lru_hits

ACCESSES = 1_000_000
SIZES = 20
PEER = Path(__file__).with_name("lru_stack_peer.py")


def zipf(objects: int = 100_000, exponent: float = 0.8) -> np.ndarray:
    """Independent accesses of skewed popularity: [ACCESSES] int64."""
    rng = np.random.default_rng(0)
    weight = np.arange(1, objects + 1) ** -exponent
    ranks = np.searchsorted(np.cumsum(weight / weight.sum()), rng.random(ACCESSES))
    return rng.permutation(objects)[np.minimum(ranks, objects - 1)].astype(np.int64)


def decode_steps(pages: int = 16_384, pages_per_step: int = 400) -> np.ndarray:
    """One unit's decoding at 128K tokens: each step reads pages near a drifting focus or anywhere."""
    rng = np.random.default_rng(1)
    steps = ACCESSES // pages_per_step
    focus = np.cumsum(rng.normal(0, 40, (steps, 1)), axis=0)
    near = focus + rng.laplace(0, 300, (steps, pages_per_step))
    anywhere = rng.integers(0, pages, near.shape)
    chosen = np.where(rng.random(near.shape) < 0.9, near.astype(np.int64), anywhere)
    return (chosen % pages).reshape(-1)


def peer_python(folder: Path) -> Path:
    """Python of a fresh environment in ``folder`` that has libCacheSim."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "libcachesim", "numpy"], check=True)
    return python


def compare(name: str, ids: np.ndarray, python: Path, folder: Path) -> dict[str, Any]:
    """One row; ``SystemExit`` if the two differ in a single hit."""
    sizes = np.unique(np.geomspace(16, len(np.unique(ids)), SIZES).astype(np.int64)).tolist()
    folder.mkdir()
    np.save(folder / "ids.npy", ids)
    (folder / "sizes.json").write_text(json.dumps(sizes))
    subprocess.run([python, PEER, folder], check=True)
    peer = json.loads((folder / "peer.json").read_text())
    hits = lru_hits(ids, sizes).tolist()
    if hits != peer["hits"]:
        raise SystemExit(f"{name}: hits differ: {hits} against {peer['hits']}")
    seconds = best_seconds(lambda: lru_hits(ids, sizes))
    return {
        "name": f"LRU hits at {len(sizes)} sizes, {len(ids):,} accesses, {name}",
        "value": seconds,
        "unit": "s",
        "peer": f"libCacheSim {peer['version']}, once per size",
        "peer_value": peer["seconds"],
        "ratio": peer["seconds"] / seconds,
        "identical_hits": True,
        "peer_hash_power": peer["hash_power"],
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        python = peer_python(folder / "venv")
        workloads = {"zipf 0.8 over 100,000 objects": zipf(), "drifting decode steps": decode_steps()}
        rows = [
            compare(name, ids, python, folder / f"run{number}")
            for number, (name, ids) in enumerate(workloads.items())
        ]
    print(table(rows))
    print(f"wrote {record(rows, 'lru_stack')}")


if __name__ == "__main__":
    main()
