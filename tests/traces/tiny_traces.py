"""Small traces with random vectors, and what was put into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtune.geometry import ModelGeometry
from kvtune.traces import SampleWriter, TraceWriter

GEOMETRY = ModelGeometry(
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    value_dim=6,
    dtype="bfloat16",
    max_positions=4096,
    scaling=0.25,
    windows=(None, 16, None),
    softcaps=(None, None, 30.0),
    sinks=(False, False, True),
)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def header(**changes: Any) -> dict[str, Any]:
    plain = {
        "model": "tiny",
        "fingerprint": "0123",
        "geometry": GEOMETRY.to_dict(),
        "dtype": "bfloat16",
        "layers": [0, 2],
        "kv_heads": [0, 1],
        "values": True,
        "rope": {"rope_type": "default"},
        "template_hash": "abc",
        "workload": {"task": "tiny", "samples": 2},
        "seed": 7,
    }
    return {**plain, **changes}


def random_vectors(*shape: int, seed: int, dtype: str = "bfloat16") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def write_sample(sample: SampleWriter, described: dict[str, Any], seed: int) -> dict[Any, Tensor]:
    """One context, two requests of two turns; the first turn's answer of request 0 is replaced.

    Returns keys, values and queries by (layer, segment, "keys" | "values" | "queries").
    """
    layers, heads, dtype = described["layers"], len(described["kv_heads"]), described["dtype"]
    context = sample.segment(
        kind="context", request=-1, turn=-1, parent=-1, start=0, token_ids=range(100, 120)
    )
    for request in (0, 1):
        parent, start = context, 20
        for turn in (0, 1):
            answer = {"request": request, "turn": turn}
            question = sample.segment(
                kind="question", parent=parent, start=start, token_ids=[1, 2, 3], **answer
            )
            generated = sample.segment(
                kind="generated", parent=question, start=start + 3, token_ids=[4, 5, 6, 7], **answer
            )
            parent, start = generated, start + 7
            if request == 0 and turn == 0:
                parent = sample.segment(
                    kind="fed_back", parent=question, start=start - 4, token_ids=[8, 9], **answer
                )
                start -= 2
            sample.record(request, turn, "tiny", "reference", "generated", 1.0 if turn else None)
    put: dict[Any, Tensor] = {}
    for layer in layers:
        for s in sample.segments:
            seeds = seed * 1000 + layer * 100 + s.segment
            keys = random_vectors(heads, s.length, 8, seed=seeds, dtype=dtype)
            values = random_vectors(heads, s.length, 6, seed=seeds + 50, dtype=dtype)
            sample.keys_values(layer, s.segment, keys, values if described["values"] else None)
            put[layer, s.segment, "keys"], put[layer, s.segment, "values"] = keys, values
            if s.kind == "fed_back":
                continue
            first = s.stop - 5 if s.kind == "context" else s.start
            steps = range(s.length) if s.kind == "generated" else [-1] * (s.stop - first)
            queries = random_vectors(s.stop - first, heads * 2, 8, seed=seeds + 70, dtype=dtype)
            sample.queries(layer, s.segment, range(first, s.stop), list(steps), max(s.turn, 0), queries)
            put[layer, s.segment, "queries"] = queries
    return put


def write_trace(path: Path, samples: int = 2, projections: bool = False, **changes: Any) -> dict[Any, Tensor]:
    """A whole trace; returns what was put in, by (sample, layer, segment, what)."""
    described = header(**changes)
    writer = TraceWriter(path, described)
    put: dict[Any, Tensor] = {}
    if projections:
        for layer in described["layers"]:
            put[layer, "o_proj"] = random_vectors(5, 24, seed=layer, dtype=described["dtype"])
            writer.o_proj(layer, put[layer, "o_proj"])
    for index in range(samples):
        with writer.sample(index) as sample:
            written = write_sample(sample, described, seed=index)
        put |= {(index, *key): tensor for key, tensor in written.items()}
    writer.finish()
    return put


def contents(path: Path) -> dict[str, bytes]:
    """Every file below ``path`` with its bytes."""
    return {
        str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()
    }
