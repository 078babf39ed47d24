"""Exact top-100 keys of one decode step on a GPU: checks, a sweep of launch shapes, torch and the floor.

One layer at batch 1: 32 query heads over 8 kv heads of 131,072 bf16 keys of dimension 128; 32 steps over
the same keys, too. Peers, in the same run: torch's matrix product in bf16 (rounded scores: not exact) and in
float32 (what kvtune ran before), each with its top-k. The floor is reading K: measured with a kernel that
sums it, in the same tiles. Times are those of CUDA graphs, unless they say eager.

Rows are written after each part. Run from the repository root:
``PYTHONPATH=. python benchmarks/exact_top100.py``; ``OUT=folder`` puts the rows elsewhere.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import record as recording
import torch
import triton
import triton.language as tl
from gpu_clock import graphed, milliseconds
from torch import Tensor

from kvtune.attention.triton_topk import Tiles, scan, search, top_keys

HEADS, GROUP, TOKENS, DIM, K, STEPS = 8, 4, 131072, 128, 100, 32
SHAPES = [
    Tiles(), Tiles(64), Tiles(256, warps=8), Tiles(128, warps=8), Tiles(64, warps=2),
    Tiles(128, span=2, stages=2), Tiles(128, span=4, stages=2), Tiles(64, span=4, stages=3),
    Tiles(64, span=8, stages=3), Tiles(64, span=8, stages=4), Tiles(128, span=8, stages=3),
    Tiles(32, span=16, stages=4, warps=2),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-sweep", action="store_true")
    options = parser.parse_args()
    if out := os.environ.get("OUT"):
        recording.RESULTS = Path(out)

    check()
    keys, queries = gaussian(HEADS, TOKENS, DIM, seed=0), gaussian(STEPS, HEADS, GROUP, DIM, seed=1)
    positions = torch.arange(TOKENS - STEPS, TOKENS, device="cuda")
    check_gaussian(keys, queries, positions)
    floor = graph_ms(reader(keys))
    print(f"reading K: {floor:.4f} ms, {keys.nbytes / floor / 1e9:.2f} TB/s (floor by the book: 0.063 ms)")
    if not options.no_sweep:
        sweep(keys, queries[-1:], positions[-1:])
    rows: list[dict[str, Any]] = []
    for steps in (1, STEPS):
        parts(queries[-steps:], keys, positions[-steps:])
        rows += step_rows(keys, queries[-steps:], positions[-steps:], floor, hard=steps == 1)
        path = recording.record(rows, "exact_top100")
    print(recording.table(rows))
    print(f"wrote {path}")


# Checks


def check() -> None:
    """Whole numbers, which bf16 and float32 hold exactly, against a stable sort in float64."""
    torch.manual_seed(0)
    cases = [
        (1, 8, 4, 5000, 128, 100, None), (3, 2, 3, 3001, 80, 128, 700), (32, 2, 4, 4099, 64, 100, None),
        (9, 2, 16, 2000, 96, 7, None), (1, 1, 1, 131072, 256, 100, 4096), (2, 1, 5, 50, 128, 100, None),
        (1, 2, 4, 300000, 128, 100, None),
    ]  # fmt: skip
    for dtype in (torch.bfloat16, torch.float16):
        for steps, heads, group, n, dim, k, window in cases:
            keys = torch.randint(-3, 4, (heads, n, dim), device="cuda").to(dtype)
            queries = torch.randint(-3, 4, (steps, heads, group, dim), device="cuda").to(dtype)
            positions = torch.randint(n // 2, n, (steps,), device="cuda").sort().values
            for struck in (None, torch.rand(steps, heads, n, device="cuda") < 0.3):
                want = slow(queries, keys, positions, k, window, struck)
                for tiles in (Tiles(), Tiles(64, span=3, stages=2)):
                    got = top_keys(queries, keys, positions, k, window, struck, tiles)
                    assert torch.equal(got, want), (dtype, steps, heads, group, n, dim, k, window, tiles)
    for name, keys in hard_keys(20000).items():
        query = torch.ones(1, 1, 1, 16, device="cuda", dtype=torch.float16)
        last = torch.tensor([19999], device="cuda")
        assert torch.equal(top_keys(query, keys, last, K), slow(query, keys, last, K, None, None)), name
    print("checks: equal to a stable float64 sort on whole numbers, ties and hostile orders", flush=True)


def slow(
    queries: Tensor, keys: Tensor, positions: Tensor, k: int, window: int | None, struck: Tensor | None
) -> Tensor:
    """Every product in float64, one step and head at a time; the lower position first in ties."""
    steps, heads, group, _ = queries.shape
    best = torch.full((steps, heads, group, k), -1, dtype=torch.int32, device="cuda")
    places = torch.arange(keys.shape[1], device="cuda")
    for step, position in enumerate(positions.tolist()):
        for head in range(heads):
            seen = (places <= position) & (places > position - (window or keys.shape[1] + 1))
            if struck is not None:
                seen &= ~struck[step, head]
            dots = (queries[step, head].double() @ keys[head].double().T).masked_fill(~seen, -math.inf)
            found = dots.sort(dim=-1, descending=True, stable=True)
            ids = found.indices.masked_fill(found.values == -math.inf, -1)[:, :k]
            best[step, head, :, : ids.shape[1]] = ids.int()
    return best


def hard_keys(n: int) -> dict[str, Tensor]:
    """Keys whose product with (1, 1, …) is all equal, ascending, descending, or best in one tile."""
    line = torch.arange(n, device="cuda")
    scores = {
        "equal": torch.ones(n, device="cuda"),
        "ascending": line,
        "descending": -line,
        "in one tile": 3000 * (line // 100 == n // 300) + line % 7,
        "one in each tile": 1000 * (line % 128 == 127) + line // 128,
    }
    keys = {}
    for name, score in scores.items():
        rows = torch.zeros(1, n, 16, device="cuda")
        rows[0, :, 0], rows[0, :, 1] = score // 128 * 128, score % 128
        keys[name] = rows.half()
    return keys


def check_gaussian(keys: Tensor, queries: Tensor, positions: Tensor) -> None:
    """On rounded sums: no key missed is better than a key taken by more than the rounding."""
    best = top_keys(queries, keys, positions, K)
    for step in (0, STEPS - 1):
        dots = queries[step].double() @ keys.double().transpose(1, 2)
        dots = dots.masked_fill(torch.arange(TOKENS, device="cuda") > positions[step], -math.inf)
        taken = dots.gather(2, best[step].long())
        assert all(len(row.unique()) == K for row in best[step].flatten(0, 1))
        short = (dots.topk(K, dim=2).values - taken).abs().max().item()
        print(f"gaussian keys, step {step}: scores within {short:.1e} of float64's best {K}", flush=True)
        assert short < 1e-3, "the wrong keys are best"


# Data and clock


def gaussian(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").bfloat16()


def graph_ms(body: Callable[[], object], inside: int = 10) -> float:
    """Time of one call in a CUDA graph of several, per call: no launch from the host in between."""
    return graphed(body, inside, repeats=15)


@triton.jit
def _read_kernel(keys, sums, SIZE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * SIZE
    values = tl.load(keys + block + tl.arange(0, SIZE)).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(values, 0))


def reader(keys: Tensor, size: int = 16384) -> Callable[[], object]:
    sums = torch.empty(keys.numel() // size, device="cuda")
    return lambda: _read_kernel[(len(sums),)](keys, sums, SIZE=size, num_warps=4)


# Launch shapes and parts


def sweep(keys: Tensor, queries: Tensor, positions: Tensor) -> None:
    print("scan, keys a tile x tiles a program, warps, stages:  ms, TB/s")
    timed: list[tuple[float, Tiles]] = []
    for tiles in SHAPES:
        label = f"  {tiles.keys:3d} x {tiles.span:2d}  {tiles.warps} warps  {tiles.stages} stages"
        try:
            time = graph_ms(lambda tiles=tiles: scan(queries, keys, positions, tiles=tiles))
        except Exception as error:  # a shape too large for the chip must not end the sweep
            print(f"{label}: {type(error).__name__} {str(error)[:80]}")
            continue
        timed.append((time, tiles))
        print(f"{label}:  {time:.4f}  {keys.nbytes / time / 1e9:.2f}", flush=True)
    best = torch.empty(1, HEADS, GROUP, K, dtype=torch.int32, device="cuda")
    print("search, keys a tile, warps:  ms")
    for size in (64, 128, 256):
        for warps in (2, 4, 8, 16):
            scores = scan(queries, keys, positions, tiles=Tiles(size, search_warps=warps))
            print(f"  {size:3d}  {warps:2d}:  {graph_ms(lambda s=scores: search(s, best)):.4f}", flush=True)
    fastest = sorted(timed, key=lambda entry: entry[0])[:3]
    for time, tiles in fastest:
        for warps in (4, 8):
            whole = replace(tiles, search_warps=warps)
            time = graph_ms(lambda t=whole: top_keys(queries, keys, positions, K, tiles=t))
            print(f"whole: {time:.4f} ms with {whole}", flush=True)


def parts(queries: Tensor, keys: Tensor, positions: Tensor) -> None:
    """Where the time goes."""
    scores = scan(queries, keys, positions)
    best = torch.empty(len(queries), HEADS, GROUP, K, dtype=torch.int32, device="cuda")
    scanned = graph_ms(lambda: scan(queries, keys, positions))
    searched = graph_ms(lambda: search(scores, best))
    print(f"{len(queries)} steps: scan {scanned:.4f} ms, search {searched:.4f} ms", flush=True)


# Rows


def step_rows(
    keys: Tensor, queries: Tensor, positions: Tensor, floor: float, hard: bool
) -> list[dict[str, Any]]:
    """The whole search against both ways of torch and against reading K."""
    flat = queries.permute(1, 0, 2, 3).flatten(1, 2)

    def ours() -> Tensor:
        return top_keys(queries, keys, positions, K)

    def rounded() -> Tensor:
        return torch.topk(torch.bmm(flat, keys.transpose(1, 2)), K, dim=2).indices

    def exact() -> Tensor:
        return torch.topk(torch.bmm(flat.float(), keys.float().transpose(1, 2)), K, dim=2).indices

    steps = len(queries)
    name = "exact_top100" if steps == 1 else f"exact_top100_{steps}_steps"
    value, eager = graph_ms(ours), milliseconds(ours)
    print(f"{name}: {value:.4f} ms, eager {eager:.4f} ms, {value / floor:.2f} x reading K", flush=True)
    if hard:
        hostile(queries, positions)
    extra = {"eager": eager, "floor": floor, "floor_ratio": value / floor, "steps": steps}
    rows = []
    for peer, body in (("torch bf16 product and topk", rounded), ("torch float32 product and topk", exact)):
        timed = _graph_or_eager(body)
        rows.append(_row(name, value, peer, timed, extra))
        print(f"  {peer}: {timed:.4f} ms, eager {milliseconds(body, 5):.4f} ms", flush=True)
    rows.append(_row(f"{name}_against_floor", value, "reading K", floor, extra))
    return rows


def hostile(queries: Tensor, positions: Tensor) -> None:
    """The time must not depend on where the best keys are."""
    for kind, rows in hard_keys(TOKENS).items():
        keys = torch.zeros(HEADS, TOKENS, DIM, device="cuda", dtype=torch.bfloat16)
        keys[:, :, :16] = rows.clamp(-6e4, 6e4).bfloat16()
        ones = torch.ones_like(queries)
        time = graph_ms(lambda k=keys, q=ones: top_keys(q, k, positions, K))
        print(f"  scores {kind}: {time:.4f} ms", flush=True)


def _graph_or_eager(body: Callable[[], object]) -> float:
    """Some of torch's kernels refuse to be captured."""
    try:
        return graph_ms(body, inside=3)
    except RuntimeError:
        torch.cuda.synchronize()
        return milliseconds(body)


def _row(name: str, value: float, peer: str, peer_value: float, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name, "value": value, "unit": "ms", "peer": peer, "peer_value": peer_value,
        "ratio": peer_value / value, "shape": [HEADS * GROUP, HEADS, TOKENS, DIM], **extra,
    }  # fmt: skip


if __name__ == "__main__":
    main()
