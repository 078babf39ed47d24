"""One layer's decode step under Quest, CTkvr and StreamingLLM, on the GPU, against flash attention.

Shape and data are those of ``sparse_decode.py``, every method at its defaults. CTkvr's prompt queries are
random, so that its lists have little in common and candidates are many. Each step runs as one CUDA graph, as
does the peer, and is checked first against the policy itself. The steps timed append some 200 tokens, which
CTkvr keeps resident.

Run from the repository root: ``PYTHONPATH=. python benchmarks/sparse_decode_methods.py``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record as recording
import torch
from sparse_decode import DIM, HEADS, KV_HEADS, LAYER, layer_of, microseconds
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvtune.attention import group_queries, sparse_attention
from kvtune.kernels.choose import BEST, choose, cut
from kvtune.kernels.query_lists import cosines, list_marked, probe
from kvtune.kernels.row_scores import row_logits
from kvtune.kernels.scan import page_bounds
from kvtune.policies.base import Policy
from kvtune.policies.ctkvr import CTkvr
from kvtune.policies.quest import Quest
from kvtune.policies.streaming import Streaming
from kvtune.policies.wave_index import WaveIndex
from kvtune.runtime.fused_ctkvr import FusedCTkvr
from kvtune.runtime.fused_layer import FusedLayer, LayerStore, RangeLayer
from kvtune.runtime.fused_quest import FusedQuest

GRID = [(1, 131072), (8, 131072)]
NEW_TOKENS = 512
GROUP = HEADS // KV_HEADS
Stages = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Method:
    """A policy, its fused layer, what its kernels read besides exact rows, and its kernels one by one."""

    policy: Policy
    make: Callable[[], Any]
    scan_bytes: Callable[[Any], int]
    stages: Callable[[Any, Tensor], Stages]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "methods", nargs="*", default=[], help="some of quest, ctkvr, streaming (default: all)"
    )
    chosen = parser.parse_args().methods or list(METHODS)
    for name in chosen:
        if name not in METHODS:
            parser.error(f"no method '{name}'; there are {', '.join(METHODS)}")
        check(name)
    rows: list[dict[str, Any]] = []
    for batch, context in GRID:
        store, query = data(batch, context)
        full = full_attention(store, query, batch, context)
        for name in chosen:
            rows += measure(name, store, query, batch, context, full)
            if out := os.environ.get("OUT"):
                recording.RESULTS = Path(out)
            path = recording.record(rows, "sparse_decode_methods")
        del store
    print(recording.table([row for row in rows if not row["name"].startswith("stage")]))
    print(f"wrote {path}")


def data(batch: int, context: int) -> tuple[LayerStore, Tensor]:
    """Keys and values of ``sparse_decode.py``, and queries [B, Hq, d]."""
    layer, query = layer_of(batch, context, WaveIndex(), NEW_TOKENS, start=False)
    return layer.store, query


def started(name: str, store: LayerStore, context: int) -> Any:
    """The layer of a method over the first ``context`` tokens."""
    method = METHODS[name]
    store.lengths = [context] * len(store.lengths)
    layer: FusedLayer = method.make()
    layer.start(store, prompt_queries(method.policy, len(store.lengths)))
    return layer


def prompt_queries(policy: Policy, batch: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (KV_HEADS, GROUP, policy.prompt_window, DIM)
    return [torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(batch)]


def check(name: str, batch: int = 2, context: int = 20000) -> None:
    """Three steps of the fused layer against the policy's own selection, in float32 arithmetic."""
    policy = METHODS[name].policy
    store, _ = data(batch, context)
    plain, _ = data(batch, context)
    layer = started(name, store, context)
    queries = prompt_queries(policy, batch)
    indexes = [policy.build(*plain.of(sequence), queries[sequence], LAYER) for sequence in range(batch)]
    for step in range(3):
        query = torch.randn(batch, HEADS, DIM, device="cuda").bfloat16()
        key, value = torch.randn(2, batch, KV_HEADS, DIM, device="cuda").bfloat16()
        out = layer.attend(query, key, value).float()
        layer.advance()
        position = torch.tensor([context + step], device="cuda")
        for sequence, index in enumerate(indexes):
            policy.append(index, key[sequence, :, None], value[sequence, :, None], position)
            units = slice(sequence * KV_HEADS, (sequence + 1) * KV_HEADS)
            plain.keys[units, context + step] = key[sequence]
            plain.values[units, context + step] = value[sequence]
            plain.lengths[sequence] = context + step + 1
            grouped = group_queries(query[sequence][None], KV_HEADS)
            selection = policy.select(index, grouped, position)
            want, _ = sparse_attention(grouped, position, *plain.of(sequence), selection, LAYER)
            want = want[0].flatten(0, 1)
            error = ((out[sequence] - want).norm() / want.norm()).item()
            same = overlap(layer, units, selection.positions[0])
            print(f"check {name} step {step} sequence {sequence}: error {error:.1e}, same tokens {same:.4f}")
            assert error < 1e-2 and same > 0.99, "the fused step differs from the policy"


def overlap(layer: Any, units: slice, positions: Tensor) -> float:
    """The least share in common, by intersection over union, of a head's attended tokens and the policy's."""
    shares = []
    for unit, theirs in zip(range(units.start, units.stop), positions.tolist()):
        first, sink, start, stop = layer.rows.resident[unit].tolist()
        listed = layer.rows.listed[unit, : int(layer.rows.n_listed[unit])].tolist()
        mine = {*range(first, first + sink), *range(start, stop), *listed}
        wanted = {row for row in theirs if row >= 0}
        shares.append(len(mine & wanted) / len(mine | wanted))
    return min(shares)


def full_attention(store: LayerStore, query: Tensor, batch: int, context: int) -> float:
    keys = store.keys.view(batch, KV_HEADS, -1, DIM)[:, :, :context]
    values = store.values.view(batch, KV_HEADS, -1, DIM)[:, :, :context]
    return microseconds(
        lambda: scaled_dot_product_attention(
            query[:, :, None], keys, values, enable_gqa=True, scale=LAYER.scaling
        )
    )


def measure(
    name: str, store: LayerStore, query: Tensor, batch: int, context: int, full: float
) -> list[dict[str, Any]]:
    layer = started(name, store, context)
    key, value = torch.randn(2, batch, KV_HEADS, DIM, device="cuda").bfloat16()
    fused = microseconds(lambda: layer.attend(query, key, value), replays=4)
    shape = {"batch": batch, "context": context}
    rows = [
        {"name": f"sparse_decode_{name}", "value": fused, "unit": "us", "peer": "flash SDPA, all keys",
         "peer_value": full, "ratio": full / fused, **shape, **traffic(name, layer)},
    ]  # fmt: skip
    grouped = query.reshape(-1, GROUP, DIM)
    stages = METHODS[name].stages(layer, grouped)
    stages["attend"] = lambda: layer.attention(
        grouped, store.keys, store.values, layer.rows, layer.out, LAYER.scaling
    )
    parts = []
    for stage, body in stages.items():
        time = microseconds(body)
        parts.append(f"{stage} {time:.1f}")
        rows.append(
            {"name": f"stage_{name}_{stage}", "value": time, "unit": "us", "peer": None, "peer_value": None,
             "ratio": None, **shape}
        )  # fmt: skip
    print(
        f"{name}, {batch} x {context}: {fused:.1f} us, full {full:.1f} us, {full / fused:.2f}x; "
        f"{', '.join(parts)}; floor {rows[0]['bytes'] / 4.8e6:.1f}"
    )
    return rows


def traffic(name: str, layer: Any) -> dict[str, int]:
    """Bytes that the last step read: the index, and the exact rows."""
    rows = layer.rows
    resident = rows.resident[:, 1] + rows.resident[:, 3] - rows.resident[:, 2]
    exact = int((rows.n_listed + resident).sum()) * 2 * DIM * layer.store.keys.element_size()
    scan = METHODS[name].scan_bytes(layer)
    return {"scan_bytes": scan, "exact_bytes": exact, "bytes": scan + exact}


def quest_scan_bytes(layer: FusedQuest) -> int:
    return int(layer.visible.sum()) * 2 * DIM * layer.low.element_size()


def ctkvr_scan_bytes(layer: FusedCTkvr) -> int:
    """Centroids, the probed lists (4 bytes an entry), and the candidates' keys."""
    item = layer.store.keys.element_size()
    centroids = int(layer.n_lists.sum()) * GROUP * DIM * item
    lists = layer.probed.numel() * layer.tokens.shape[2] * 4
    return centroids + lists + int(layer.n_candidates.sum()) * DIM * item


def quest_stages(layer: FusedQuest, grouped: Tensor) -> Stages:
    def chosen() -> None:  # a choice leaves its scratch to the cut
        choose(layer.logits, layer.stats, layer.sizes, layer.plan, layer.choice, BEST)
        cut(layer.choice, layer.sizes, layer.plan, layer.offsets, layer.rows.listed, layer.policy.page_size)

    return {
        "scan": lambda: page_bounds(
            grouped, layer.low, layer.high, layer.visible, layer.logits, layer.stats, LAYER.scaling
        ),
        "choose_and_cut": chosen,
    }


def ctkvr_stages(layer: FusedCTkvr, grouped: Tensor) -> Stages:
    found = (layer.candidates, layer.n_candidates)

    def chosen() -> None:  # a choice leaves its scratch to the cut
        choose(layer.logits, layer.stats, layer.sizes, layer.plan, layer.choice)
        cut(layer.choice, layer.sizes, layer.plan, layer.candidates, layer.rows.listed, 1)

    return {
        "cosines": lambda: cosines(grouped, layer.centroids, layer.norms, layer.similarity, layer.marks),
        "probe": lambda: probe(
            layer.similarity, layer.tokens, layer.n_lists, layer.stop, layer.probed, layer.marks
        ),
        "union": lambda: list_marked(layer.marks, *found, layer.plan),
        "rescore": lambda: row_logits(
            grouped, layer.store.keys, *found, layer.logits, layer.stats, LAYER.scaling
        ),
        "choose_and_cut": chosen,
    }


STREAMING = Streaming()
METHODS = {
    "quest": Method(Quest(), lambda: FusedQuest(LAYER, Quest()), quest_scan_bytes, quest_stages),
    "ctkvr": Method(CTkvr(), lambda: FusedCTkvr(LAYER, CTkvr()), ctkvr_scan_bytes, ctkvr_stages),
    "streaming": Method(
        STREAMING,
        lambda: RangeLayer(LAYER, STREAMING.sink, STREAMING.recent),
        lambda layer: 0,
        lambda layer, grouped: {},
    ),
}


if __name__ == "__main__":
    main()
