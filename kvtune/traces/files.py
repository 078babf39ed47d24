"""Vectors in Parquet: bit-for-bit tensors as ``FixedSizeBinary`` rows, written and read by row group.

Neither way goes through a numpy dtype (numpy has no bfloat16): tensors are viewed as bytes. A row group's
vectors lie in the file as one plain run of bytes, which is read straight into the tensor made for them:
as fast as reading the file raw, where Arrow's decoder needs a copy of its own.
"""

from __future__ import annotations

import inspect
import math
import mmap
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvtune.errors import TraceError
from kvtune.traces.integrity import damaged

_DELTA = ("step", "position")
_HUGE = 4 << 20
_ONE_PAGE = {
    name: 1 << 30
    for name in ("data_page_size", "max_rows_per_page")
    if name in inspect.signature(pq.write_table).parameters
}
_NOT_UNDERSTOOD = (
    pa.ArrowException,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
)
"""What pyarrow, or looking at what it returned, may raise on a damaged file."""


def binary_array(vectors: Tensor) -> pa.FixedSizeBinaryArray:
    """[n, d] of any dtype as n fixed-size binaries, sharing memory where the tensor allows it."""
    n, dim = vectors.shape
    width = dim * vectors.element_size()
    raw = vectors.detach().cpu().contiguous().view(torch.uint8).numpy()
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), n, [None, pa.py_buffer(raw)])


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor, in huge pages where the system grants them.

    With ordinary pages, reading a file into fresh memory spends most of its time on page faults.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _page_begin(size: int) -> bytes:
    """How a data page of ``size`` bytes begins, in Thrift's compact protocol.

    Field 1, the page type, is 0 (data page); field 2, its size, is a zigzag varint. A page as large as all
    values of its column chunk is the chunk's only one, and holds nothing but them.
    """
    begin, rest = bytearray(b"\x15\x00\x15"), 2 * size
    while rest > 0x7F:
        begin.append(0x80 | rest & 0x7F)
        rest >>= 7
    return bytes([*begin, rest])


class VectorWriter:
    """One Parquet file of vectors; each :meth:`write` is one row group."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        ids = [field.name for field in schema if field.type == pa.int32()]
        self.path = path
        self.schema = schema
        self.rows = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = pq.ParquetWriter(
            path,
            schema,
            compression="none",
            use_dictionary=[name for name in ids if name not in _DELTA],
            column_encoding={name: "DELTA_BINARY_PACKED" for name in ids if name in _DELTA},
            write_statistics=ids,
            **_ONE_PAGE,
        )

    def write(self, columns: dict[str, Any]) -> None:
        """Append one row group: int32 arrays for ids, tensors [n, d] for vectors, in schema order."""
        arrays = [
            binary_array(column) if isinstance(column, Tensor) else pa.array(column, pa.int32())
            for column in columns.values()
        ]
        table = pa.Table.from_arrays(arrays, schema=self.schema)
        self._writer.write_table(table, row_group_size=max(len(table), 1))
        self.rows += len(table)

    def close(self) -> None:
        self._writer.close()


class VectorFile:
    """One Parquet file of vectors, memory-mapped.

    ``schema`` is what the file must have: names, types, dtypes and the part, sample and layer it is of.
    Raises ``TraceError`` naming the file wherever its content is not what a trace writes.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        with self._understanding():
            self._file = pq.ParquetFile(path, memory_map=True)
            if not self._file.schema_arrow.equals(schema, check_metadata=True):
                raise damaged(path, "its columns are not those of this layer and sample")
        self._columns = {name: column for column, name in enumerate(schema.names)}

    @property
    def n_groups(self) -> int:
        return self._file.metadata.num_row_groups

    def rows(self, group: int) -> int:
        return self._file.metadata.row_group(group).num_rows

    def groups_by(self, *names: str) -> dict[tuple[int, ...], list[int]]:
        """Row groups by the value each of the id columns ``names`` has throughout the group."""
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for group in range(self.n_groups):
            groups[tuple(self._constant(group, name) for name in names)].append(group)
        return dict(groups)

    def ids(self, group: int, *names: str) -> list[NDArray[np.int32]]:
        """The id columns ``names`` of one row group, each [rows]."""
        with self._understanding():
            table = self._file.read_row_group(group, columns=list(names), use_threads=False)
            return [table.column(name).to_numpy() for name in names]

    def copy_into(self, out: Tensor, group: int, name: str) -> None:
        """Copy the vectors ``name`` of one row group into ``out`` [rows, d], contiguous, bit for bit."""
        target = out.view(torch.uint8).numpy()
        with self._understanding():
            if self.rows(group) != len(target):
                raise damaged(
                    self.path, f"row group {group} holds {self.rows(group)} rows, not {len(target)}"
                )
            if not self._read_into(target, group, name):
                self._decode_into(target, group, name)

    def _read_into(self, target: NDArray[np.uint8], group: int, name: str) -> bool:
        """Read the vectors as the bytes they are, if they are one page of plain values without levels."""
        chunk = self._file.metadata.row_group(group).column(self._columns[name])
        begin = _page_begin(target.nbytes)
        with self.path.open("rb", buffering=0) as file:
            file.seek(chunk.data_page_offset)
            if file.read(len(begin)) != begin:
                return False
            file.seek(chunk.data_page_offset + chunk.total_compressed_size - target.nbytes)
            rest = target.data.cast("B")
            while rest:
                count = file.readinto(rest)
                if not count:
                    raise damaged(self.path, "it ends early")
                rest = rest[count:]
        return True

    def _decode_into(self, target: NDArray[np.uint8], group: int, name: str) -> None:
        """Let Arrow decode the vectors: some versions can't be told to write a row group as one page."""
        column = self._file.read_row_group(group, columns=[name], use_threads=False).column(name)
        row = 0
        for chunk in column.chunks:
            width = chunk.type.byte_width
            data = np.frombuffer(chunk.buffers()[1], np.uint8, len(chunk) * width, chunk.offset * width)
            target[row : row + len(chunk)] = data.reshape(len(chunk), width)
            row += len(chunk)

    def bounds(self, group: int, name: str) -> tuple[int, int]:
        """The lowest and the highest value of the id column ``name`` in one row group."""
        with self._understanding():
            statistics = self._file.metadata.row_group(group).column(self._columns[name]).statistics
            return int(statistics.min), int(statistics.max)

    def _constant(self, group: int, name: str) -> int:
        low, high = self.bounds(group, name)
        if low != high:
            raise damaged(self.path, f"row group {group} mixes several values of '{name}'")
        return low

    @contextmanager
    def _understanding(self) -> Iterator[None]:
        try:
            yield
        except TraceError:
            raise
        except _NOT_UNDERSTOOD as error:
            raise damaged(self.path, error) from error
