"""libCacheSim's side of lru_stack.py; runs in an environment of its own and knows nothing of kvtune.

Usage: python lru_stack_peer.py FOLDER. Reads ids.npy and sizes.json there, writes peer.json: hits by size and
the seconds of one LRU run a size, at the hash table size that suits libCacheSim best.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from time import perf_counter

import libcachesim
import numpy as np

HASH_POWERS = (16, 17, 18, 20, 24)
REPEATS = 3


def write_requests(ids: np.ndarray, path: Path) -> None:
    """The accesses in libCacheSim's own binary format, every object of size 1."""
    layout = [("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")]
    requests = np.zeros(len(ids), np.dtype(layout))
    requests["time"] = np.arange(len(ids))
    requests["id"] = ids + 1
    requests["size"] = 1
    requests.tofile(path)


def run(path: Path, sizes: list[int], hash_power: int, accesses: int) -> tuple[list[int], float]:
    """Hits at each size, and the seconds of all runs (opening the file is not counted)."""
    hits, seconds = [], 0.0
    for size in sizes:
        reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        cache = libcachesim.LRU(cache_size=size, hashpower=hash_power)
        start = perf_counter()
        miss_ratio, _ = cache.process_trace(reader)
        seconds += perf_counter() - start
        hits.append(round((1 - miss_ratio) * accesses))
    return hits, seconds


def main(folder: Path) -> None:
    ids = np.load(folder / "ids.npy")
    sizes = json.loads((folder / "sizes.json").read_text())
    path = folder / "requests.oracleGeneral.bin"
    write_requests(ids, path)
    probes = {power: run(path, sizes[:: len(sizes) - 1], power, len(ids))[1] for power in HASH_POWERS}
    best = min(probes, key=lambda power: probes[power])
    runs = [run(path, sizes, best, len(ids)) for _ in range(REPEATS)]
    result = {
        "hits": runs[0][0],
        "seconds": min(seconds for _, seconds in runs),
        "hash_power": best,
        "version": importlib.metadata.version("libcachesim"),
    }
    (folder / "peer.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
