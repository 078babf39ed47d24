"""One small trace for the caching tests, long enough for the wave index to cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvtune.geometry import ModelGeometry
from kvtune.traces import TraceWriter

GEOMETRY = ModelGeometry(
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    value_dim=8,
    dtype="float32",
    max_positions=4096,
    scaling=8**-0.5,
    windows=(None, None, None),
    softcaps=(None, None, None),
    sinks=(False, False, False),
)
CONTEXT, QUESTION, ANSWER = 1400, 10, 40


@pytest.fixture(scope="session")
def drifting_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two samples, one request each, layers 0 and 2; 40 decode steps whose queries drift."""
    path = tmp_path_factory.mktemp("traces") / "drifting"
    header = {
        "model": "tiny-random",
        "fingerprint": "0123456789abcdef",
        "geometry": GEOMETRY.to_dict(),
        "dtype": "float32",
        "layers": [0, 2],
        "kv_heads": [0, 1],
        "values": True,
        "workload": "random",
        "seed": 0,
    }
    writer = TraceWriter(path, header)
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        with writer.sample(number) as sample:
            parent, start = -1, 0
            for kind, length in (("context", CONTEXT), ("question", QUESTION), ("generated", ANSWER)):
                turn = -1 if kind == "context" else 0
                ids = torch.randint(0, 99, (length,), generator=generator)
                parent = sample.segment(
                    kind=kind, request=0, turn=turn, parent=parent, start=start, token_ids=ids
                )
                for layer in (0, 2):
                    vectors = torch.randn(2, 2, length, 8, generator=generator)
                    sample.keys_values(layer, parent, 2 * vectors[0], vectors[1])
                    if kind == "generated":
                        queries = torch.randn(length, 4, 8, generator=generator).cumsum(0) / 2
                        positions = torch.arange(start, start + length)
                        sample.queries(layer, parent, positions, torch.arange(length), 0, queries)
                start += length
            sample.record(0, 0, "random", reference="yes", generated="yes", score=1.0)
    writer.finish()
    return path
