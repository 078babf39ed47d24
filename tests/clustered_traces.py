"""A trace long enough for an index: clustered keys, queries that look for some of the clusters."""

from __future__ import annotations

from pathlib import Path

import torch

from kvtune.geometry import ModelGeometry
from kvtune.traces import TraceWriter

LAYERS, HEADS, GROUP, DIM = 3, 2, 2, 16
CONTEXT, ANSWER = 1500, 6
GEOMETRY = ModelGeometry(
    n_layers=LAYERS,
    n_heads=HEADS * GROUP,
    n_kv_heads=HEADS,
    head_dim=DIM,
    value_dim=DIM,
    dtype="float32",
    max_positions=4096,
    scaling=DIM**-0.5,
    windows=(None, None, 64),
    softcaps=(None,) * LAYERS,
    sinks=(False,) * LAYERS,
)


def write_clustered(
    path: Path, samples: int = 3, prompt_queries: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Layer 0 is easy (tight clusters), layer 1 hard (no clusters), layer 2 windowed.

    ``prompt_queries``: how many of the context's last queries are recorded, too.
    """
    named = str(dtype).removeprefix("torch.")
    header = {
        "model": "clustered",
        "fingerprint": "feedbeef",
        "geometry": {**GEOMETRY.to_dict(), "dtype": named},
        "dtype": named,
        "layers": list(range(LAYERS)),
        "kv_heads": list(range(HEADS)),
        "values": True,
        "workload": {"task": "clustered"},
        "seed": 0,
    }
    writer = TraceWriter(path, header)
    for number in range(samples):
        generator = torch.Generator().manual_seed(number)
        with writer.sample(number) as sample:
            place = {"request": 0, "turn": 0}
            context = sample.segment(
                kind="context", request=-1, turn=-1, parent=-1, start=0, token_ids=range(CONTEXT)
            )
            answer = sample.segment(
                kind="generated", parent=context, start=CONTEXT, token_ids=range(ANSWER), **place
            )
            for layer in range(LAYERS):
                centres = torch.randn(HEADS, 60, DIM, generator=generator) * 2
                spread = (0.2, 2.0, 1.0)[layer]
                for segment, length in ((context, CONTEXT), (answer, ANSWER)):
                    which = torch.randint(0, 60, (length,), generator=generator)
                    keys = centres[:, which] + spread * torch.randn(HEADS, length, DIM, generator=generator)
                    values = torch.randn(HEADS, length, DIM, generator=generator)
                    sample.keys_values(layer, segment, keys.to(dtype), values.to(dtype))
                wanted = centres[:, :GROUP].flatten(0, 1)
                queries = wanted + 0.3 * torch.randn(ANSWER, HEADS * GROUP, DIM, generator=generator)
                positions = torch.arange(CONTEXT, CONTEXT + ANSWER)
                if prompt_queries:
                    last = torch.arange(CONTEXT - prompt_queries, CONTEXT)
                    asked = (
                        wanted.expand(prompt_queries, -1, -1)
                        * torch.linspace(0.5, 1, prompt_queries)[:, None, None]
                    )
                    sample.queries(layer, context, last, torch.full_like(last, -1), -1, asked.to(dtype))
                sample.queries(layer, answer, positions, torch.arange(ANSWER), 0, queries.to(dtype))
            sample.record(0, 0, "clustered", "reference", "generated", None)
    writer.finish()
    return path
