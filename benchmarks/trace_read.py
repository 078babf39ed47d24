"""Reading a trace against reading its files raw, and FixedSizeBinary against FixedSizeList (arrow#34510).

Files are in the page cache, as they are for a trace analysed more than once. Writing, which ends on the
disk, is held against a raw write and flush of the same bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from record import best_seconds_of, record, table

from kvtune.geometry import ModelGeometry
from kvtune.traces import TraceWriter, open_trace
from kvtune.traces.schema import kv_name

GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="kvtune-trace-read-"))
    try:
        rows = [*trace_rows(folder, options), *column_rows(folder, options)]
    finally:
        shutil.rmtree(folder)
    print(table(rows))
    print(f"wrote {record(rows, 'trace_read')}")


def trace_rows(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The public reader against ``read_bytes``, the writer against ``write`` and ``fsync``."""
    shape = (options.kv_heads, options.tokens, options.dim)
    keys, values = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(2))
    path = folder / "trace"
    size = keys.nbytes + values.nbytes

    def write() -> None:
        writer = TraceWriter(path, header(options), overwrite=path.exists())
        with writer.sample(0) as sample:
            context = options.tokens - 64
            sample.segment(
                kind="context", request=-1, turn=-1, parent=-1, start=0, token_ids=torch.zeros(context).long()
            )
            sample.segment(kind="generated", request=0, turn=0, parent=0, start=context, token_ids=[0] * 64)
            sample.keys_values(0, 0, keys[:, :context], values[:, :context])
            sample.keys_values(0, 1, keys[:, context:], values[:, context:])
        writer.finish()

    def write_raw() -> None:
        with (folder / "raw").open("wb") as file:
            file.write(keys.view(torch.uint8).numpy())
            file.write(values.view(torch.uint8).numpy())
            os.fsync(file.fileno())

    def read(verify: bool) -> Callable[[], object]:
        def body() -> object:
            layer = open_trace(path, verify=verify).timelines(0)[0].layer(0)
            return layer.keys, layer.values

        return body

    written, written_raw = best_seconds_of(write, write_raw, repeats=options.repeats)
    file = path / kv_name(0, 0)
    warm = bytearray(file.stat().st_size)

    def read_warm() -> None:
        with file.open("rb", buffering=0) as raw:
            raw.readinto(warm)

    fast, verified, raw, floor = best_seconds_of(
        read(False), read(True), file.read_bytes, read_warm, repeats=options.repeats
    )
    name = "read keys and values of a timeline"
    return [
        throughput(name, size / fast, "raw file read", size / raw),
        throughput(name, size / fast, "raw read, memory reused", size / floor),
        throughput(f"{name}, checksum verified", size / verified, "raw file read", size / raw),
        throughput("write keys and values", size / written, "raw write and flush", size / written_raw),
    ]


def column_rows(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The two ways to store a vector column, read by plain pyarrow into numpy."""
    n, dim = options.tokens, options.dim
    numbers = np.random.default_rng(0).integers(0, 2**16, (options.kv_heads, n * dim), dtype=np.uint16)
    binary, listed = pa.binary(2 * dim), pa.list_(pa.uint16(), dim)
    chunks = {
        binary: [
            pa.FixedSizeBinaryArray.from_buffers(binary, n, [None, pa.py_buffer(row)]) for row in numbers
        ],
        listed: [pa.FixedSizeListArray.from_arrays(pa.array(row), dim) for row in numbers],
    }

    def reader(kind: pa.DataType) -> Callable[[], object]:
        path = folder / f"{kind.id}.parquet"
        schema = pa.schema([pa.field("key", kind, nullable=False)])
        columns = pa.table([pa.chunked_array(chunks[kind])], schema=schema)
        pq.write_table(
            columns, path, row_group_size=n, compression="none", use_dictionary=False, write_statistics=False
        )

        def body() -> object:
            file = pq.ParquetFile(path, memory_map=True)
            return [file.read_row_group(group, use_threads=False) for group in range(file.num_row_groups)]

        return body

    fast, slow = best_seconds_of(reader(binary), reader(listed), repeats=options.repeats)
    return [
        throughput(
            "FixedSizeBinary column, pyarrow",
            numbers.nbytes / fast,
            "FixedSizeList column, pyarrow",
            numbers.nbytes / slow,
        )
    ]


def header(options: argparse.Namespace) -> dict[str, Any]:
    geometry = ModelGeometry(
        n_layers=1,
        n_heads=options.kv_heads,
        n_kv_heads=options.kv_heads,
        head_dim=options.dim,
        value_dim=options.dim,
        dtype="bfloat16",
        max_positions=options.tokens,
        scaling=options.dim**-0.5,
        windows=(None,),
        softcaps=(None,),
        sinks=(False,),
    )
    return {
        "model": "random",
        "fingerprint": "",
        "geometry": geometry.to_dict(),
        "dtype": "bfloat16",
        "layers": [0],
        "kv_heads": list(range(options.kv_heads)),
        "values": True,
    }


def throughput(name: str, value: float, peer: str, peer_value: float) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value / GB, 3),
        "unit": "GB/s",
        "peer": peer,
        "peer_value": round(peer_value / GB, 3),
        "ratio": round(value / peer_value, 3),
    }


if __name__ == "__main__":
    main()
