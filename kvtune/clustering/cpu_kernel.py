"""The inner kernel of assignment on CPU: a register tile of scores, folded into the running best at once.

A matrix product that writes its scores and reads them back for the maximum spends a third of its time on
that traffic when the depth is only a head's dimension. Here ``ROWS`` centroids × ``KEYS`` keys are summed
in vector registers and folded there. Numba cannot be made to keep such a tile in registers from loops, so
the tile is written in LLVM's terms.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))
_LANES = 16 if _WIDE else 8
_VECTORS = 2
ROWS = 12 if _WIDE else 6
KEYS = _LANES * _VECTORS

_FLOATS = ir.VectorType(ir.FloatType(), _LANES)
_INTEGERS = ir.VectorType(ir.IntType(32), _LANES)


@intrinsic
def _fold_tile(
    typing_context: Any, panel: Any, centroids: Any, depth: Any, first: Any, best: Any, index: Any
) -> Any:
    """Fold the scores of ROWS centroids and KEYS keys into the keys' best scores and centroid numbers.

    By address: panel [depth, KEYS] and centroids [ROWS, depth] float32, best [KEYS] float32, index [KEYS]
    int32; ``first`` is the number of the first centroid. Only a greater score replaces the best.
    """
    signature = types.void(types.uintp, types.uintp, types.intp, types.int32, types.uintp, types.uintp)
    return signature, _generate


def _generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    panel, centroids, depth, first, best, index = arguments
    panel = builder.inttoptr(panel, _FLOATS.as_pointer())
    centroids = builder.inttoptr(centroids, ir.FloatType().as_pointer())
    sums = [cgutils.alloca_once(builder, _FLOATS) for _ in range(ROWS * _VECTORS)]
    for total in sums:
        builder.store(ir.Constant(_FLOATS, [0.0] * _LANES), total)
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{_LANES}f32")
    with cgutils.for_range(builder, depth) as loop:
        vectors = builder.mul(loop.index, depth.type(_VECTORS))
        keys = [_load(builder, panel, builder.add(vectors, depth.type(v))) for v in range(_VECTORS)]
        for row in range(ROWS):
            at = builder.add(builder.mul(depth, depth.type(row)), loop.index)
            centroid = _spread(builder, builder.load(builder.gep(centroids, [at])), _FLOATS)
            for v in range(_VECTORS):
                total = sums[row * _VECTORS + v]
                builder.store(builder.call(fma, [centroid, keys[v], builder.load(total)]), total)
    best = builder.inttoptr(best, _FLOATS.as_pointer())
    index = builder.inttoptr(index, _INTEGERS.as_pointer())
    for v in range(_VECTORS):
        here = depth.type(v)
        top, chosen = _load(builder, best, here), _load(builder, index, here)
        for row in range(ROWS):
            score = builder.load(sums[row * _VECTORS + v])
            number = _spread(builder, builder.add(first, first.type(row)), _INTEGERS)
            better = builder.fcmp_ordered(">", score, top)
            top = builder.select(better, score, top)
            chosen = builder.select(better, number, chosen)
        builder.store(top, builder.gep(best, [here]), align=4)
        builder.store(chosen, builder.gep(index, [here]), align=4)
    return context.get_dummy_value()


def _load(builder: Any, base: Any, offset: Any) -> Any:
    return builder.load(builder.gep(base, [offset]), align=4)


def _spread(builder: Any, scalar: Any, kind: Any) -> Any:
    """A vector with ``scalar`` in every lane."""
    nothing = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(nothing, scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(single, nothing, ir.Constant(_INTEGERS, [0] * _LANES))


@numba.njit(nogil=True, cache=True)
def fold(panels, centroids, block, best, index):  # type: ignore[no-untyped-def]
    """Fold all centroids into the running best of all keys.

    panels [n, depth, KEYS] and centroids [c, depth] float32, c a multiple of ROWS; best [n, KEYS] float32,
    index [n, KEYS] int32. ``block`` centroids (a multiple of ROWS) at a time meet all panels, from cache.
    """
    n, depth, keys = panels.shape
    for start in range(0, len(centroids), block):
        for panel in range(n):
            for first in range(start, min(start + block, len(centroids)), ROWS):
                _fold_tile(  # type: ignore[call-arg]
                    panels.ctypes.data + panel * depth * keys * 4,
                    centroids.ctypes.data + first * depth * 4,
                    depth,
                    numba.int32(first),
                    best.ctypes.data + panel * keys * 4,
                    index.ctypes.data + panel * keys * 4,
                )
