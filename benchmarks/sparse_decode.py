"""One layer's decode step under the wave index, all on the GPU, against flash attention over all keys.

The shape is an 8B model's: 32 query and 8 kv heads of dimension 128, bf16. The step writes the new token,
scores all centroids, chooses 1.8% of the clusters to read and 23.2% to estimate, and attends; it runs as one
CUDA graph, as does the peer. Checked first against the policy itself.

Run from the repository root: ``PYTHONPATH=. python benchmarks/sparse_decode.py``.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record as recording
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvtune.attention import group_queries, sparse_attention
from kvtune.geometry import LayerInfo
from kvtune.kernels.attend import Estimate
from kvtune.kernels.choose import choose, cut
from kvtune.kernels.scan import centroid_logits
from kvtune.policies.wave_index import WaveIndex
from kvtune.runtime.fused_layer import LayerStore
from kvtune.runtime.fused_wave import FusedWave

HEADS, KV_HEADS, DIM = 32, 8, 128
LAYER = LayerInfo(0, 32, HEADS, KV_HEADS, DIM, DIM, DIM**-0.5)
GRID = [(1, 32768), (8, 32768), (16, 32768), (1, 131072), (8, 131072), (16, 131072)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the largest setting only")
    options = parser.parse_args()
    check()
    rows = []
    for batch, context in [(8, 131072)] if options.quick else GRID:
        rows += measure(batch, context)
        if out := os.environ.get("OUT"):
            recording.RESULTS = Path(out)
        path = recording.record(rows, "sparse_decode")
    print(recording.table([row for row in rows if not row["name"].startswith("stage")]))
    print(f"wrote {path}")


def layer_of(
    batch: int, context: int, policy: WaveIndex, new_tokens: int, start: bool = True
) -> tuple[FusedWave, Tensor]:
    """A layer over random keys around a few hundred directions, and queries [B, Hq, d]."""
    generator = torch.Generator("cuda").manual_seed(context + batch)
    store = LayerStore.empty(LAYER, batch, context + new_tokens, torch.bfloat16, "cuda")
    for unit in range(batch * KV_HEADS):
        directions = torch.randn(256, DIM, device="cuda", generator=generator)
        nearest = torch.randint(256, (context,), device="cuda", generator=generator)
        noise = torch.randn(context, DIM, device="cuda", generator=generator)
        store.keys[unit, :context] = (directions[nearest] + noise).bfloat16()
        store.values[unit, :context] = torch.randn(
            context, DIM, device="cuda", generator=generator
        ).bfloat16()
    store.lengths = [context] * batch
    layer = FusedWave(LAYER, policy, new_tokens)
    layer.store = store
    if start:
        layer.start(store)
    return layer, torch.randn(batch, HEADS, DIM, device="cuda", generator=generator).bfloat16()


def check() -> None:
    """Three steps of the fused layer against the policy's own selection, in float32 arithmetic."""
    policy = WaveIndex()
    layer, _ = layer_of(2, 20000, policy, 64)
    plain, _ = layer_of(2, 20000, policy, 64, start=False)
    states = []
    for sequence in range(2):
        keys, values = plain.store.of(sequence)
        states.append(policy.build(keys, values, keys.new_zeros(KV_HEADS, 4, 0, DIM), LAYER))
    for step in range(3):
        query = torch.randn(2, HEADS, DIM, device="cuda").bfloat16()
        key, value = torch.randn(2, 2, KV_HEADS, DIM, device="cuda").bfloat16()
        out = layer.attend(query, key, value).float()
        layer.advance()
        for sequence, state in enumerate(states):
            position = torch.tensor([20000 + step], device="cuda")
            policy.append(state, key[sequence, :, None], value[sequence, :, None], position)
            units = slice(sequence * KV_HEADS, (sequence + 1) * KV_HEADS)
            plain.store.keys[units, 20000 + step] = key[sequence]
            plain.store.values[units, 20000 + step] = value[sequence]
            plain.store.lengths[sequence] = 20001 + step
            keys, values = plain.store.of(sequence)
            grouped = group_queries(query[sequence][None], KV_HEADS)
            selection = policy.select(state, grouped, position)
            want, _ = sparse_attention(grouped, position, keys, values, selection, LAYER)
            want = want[0].flatten(0, 1)
            mine = layer.choice.retrieved[units].long()
            kept = selection.blocks[0]
            same = torch.stack([torch.isin(a, b).float().mean() for a, b in zip(mine, kept)]).mean()
            error = ((out[sequence] - want).norm() / want.norm()).item()
            print(
                f"check step {step} sequence {sequence}: output error {error:.1e}, same clusters {same:.4f}"
            )
            assert error < 1e-2 and same > 0.99, "the fused step differs from the policy"


def measure(batch: int, context: int) -> list[dict[str, Any]]:
    layer, query = layer_of(batch, context, WaveIndex(), 2048)
    key, value = torch.randn(2, batch, KV_HEADS, DIM, device="cuda").bfloat16()
    mark = layer.mark()  # the dense tail holds 64 tokens at first, at most 164 as it is timed
    fused = microseconds(lambda: layer.attend(query, key, value), before=lambda: layer.rewind(mark))
    layer.rewind(mark)
    layer.attend(query, key, value)
    keys = layer.store.keys.view(batch, KV_HEADS, -1, DIM)[:, :, :context]
    values = layer.store.values.view(batch, KV_HEADS, -1, DIM)[:, :, :context]
    full = microseconds(
        lambda: scaled_dot_product_attention(
            query[:, :, None], keys, values, enable_gqa=True, scale=LAYER.scaling
        )
    )
    shape = {"batch": batch, "context": context}
    rows = [
        {"name": "sparse_decode_attention", "value": fused, "unit": "us", "peer": "flash SDPA, all keys",
         "peer_value": full, "ratio": full / fused, **shape, **traffic(layer)},
    ]  # fmt: skip
    for name, body in stages(layer, query, key, value).items():
        time = microseconds(body)
        rows.append(
            {"name": f"stage_{name}", "value": time, "unit": "us", "peer": None, "peer_value": None,
             "ratio": None, **shape}
        )  # fmt: skip
    parts = ", ".join(f"{row['name'][6:]} {row['value']:.1f}" for row in rows[1:])
    floor = rows[0]["bytes"] / 4.8e6
    print(
        f"{batch} x {context}: {fused:.1f} us, full {full:.1f} us, {full / fused:.2f}x; "
        f"{parts}; floor {floor:.1f}"
    )
    return rows


def traffic(layer: FusedWave) -> dict[str, int]:
    """Bytes a step reads: all centroids, the value sums estimated, the exact rows."""
    item = layer.store.keys.element_size()
    scan = int(layer.visible.sum()) * DIM * item
    estimated = int(layer.choice.n_estimated.sum()) * DIM * item
    resident = layer.resident[:, 1] + layer.resident[:, 3] - layer.resident[:, 2]
    exact = int((layer.choice.n_tokens + resident).sum()) * 2 * DIM * item
    return {
        "scan_bytes": scan,
        "estimation_bytes": estimated,
        "exact_bytes": exact,
        "bytes": scan + estimated + exact,
    }


def stages(layer: FusedWave, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Callable[[], object]]:
    grouped = query.reshape(-1, LAYER.group, DIM)
    estimate = Estimate(
        layer.logits, layer.sizes, layer.value_sums, layer.choice.estimated, layer.choice.n_estimated
    )
    store = layer.store
    return {
        "scan": lambda: centroid_logits(
            grouped, layer.centroids, layer.visible, layer.logits, layer.stats, LAYER.scaling
        ),
        "choose": lambda: choose_and_cut(layer),
        "estimate": lambda: layer.attention.estimate(estimate, grouped, LAYER.scaling),
        "attend": lambda: layer.attention(
            grouped, store.keys, store.values, layer.rows, layer.out, LAYER.scaling, layer.choice.n_estimated
        ),
        "append": lambda: store.append(key, value, layer.resident),
    }


def choose_and_cut(layer: FusedWave) -> None:
    """Together: the cut clears what the choice counts in."""
    choose(layer.logits, layer.stats, layer.sizes, layer.plan, layer.choice)
    cut(layer.choice, layer.sizes, layer.plan, layer.offsets, layer.rows.listed)


def microseconds(
    body: Callable[[], object],
    replays: int = 20,
    repeats: int = 9,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Median time of one call inside a CUDA graph of several; ``before`` each timed stretch of 100 calls."""
    body()
    torch.cuda.synchronize()
    graph, calls = torch.cuda.CUDAGraph(), 5
    with torch.cuda.graph(graph):
        for _ in range(calls):
            body()
    graph.replay()
    times = []
    for _ in range(repeats):
        before()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (replays * calls))
    return statistics.median(times)


if __name__ == "__main__":
    main()
