"""One tiny trace for all analysis tests: random vectors whose neighbouring decode steps are alike."""

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
    windows=(None, None, 24),
    softcaps=(None, None, None),
    sinks=(False, False, False),
)
CONTEXT, QUESTION, ANSWER, TURNS = 60, 5, 9, 2


def write_trace(
    path: Path,
    samples: int = 2,
    layers: tuple[int, ...] = (0, 1, 2),
    poison: int | None = None,
    with_values: bool = True,
    model: str = "tiny-random",
) -> Path:
    """Samples of one request with two turns; ``poison``: the position of a NaN key of kv head 1."""
    header = {
        "model": model,
        "fingerprint": "0123456789abcdef",
        "geometry": GEOMETRY.to_dict(),
        "dtype": "float32",
        "layers": list(layers),
        "kv_heads": [0, 1],
        "values": with_values,
        "workload": "random",
        "seed": 0,
    }
    writer = TraceWriter(path, header)
    for number in range(samples):
        with writer.sample(number) as sample:
            generator = torch.Generator().manual_seed(number)
            parent, start = -1, 0
            for kind, turn, length in _plan():
                ids = torch.randint(0, 99, (length,), generator=generator)
                parent = sample.segment(
                    kind=kind, request=0, turn=turn, parent=parent, start=start, token_ids=ids
                )
                for layer in layers:
                    keys = 2 * torch.randn(2, length, 8, generator=generator)
                    values = torch.randn(2, length, 8, generator=generator)
                    if poison is not None and start <= poison < start + length:
                        keys[1, poison - start, 3] = float("nan")
                    sample.keys_values(layer, parent, keys, values if with_values else None)
                    drift = torch.randn(length, 4, 8, generator=generator).cumsum(0) / 3
                    queries = torch.randn(1, 4, 8, generator=generator) + drift
                    steps = torch.arange(length) if kind == "generated" else torch.full((length,), -1)
                    positions = torch.arange(start, start + length)
                    sample.queries(layer, parent, positions, steps, turn, queries)
                start += length
            for turn in range(TURNS):
                sample.record(0, turn, "random", reference="yes", generated="yes", score=1.0 - turn)
    writer.finish()
    return path


def _plan() -> list[tuple[str, int, int]]:
    turns = [(kind, turn, n) for turn in range(TURNS) for kind, n in (("question", 5), ("generated", ANSWER))]
    return [("context", -1, CONTEXT), *turns]


@pytest.fixture(scope="session")
def make_trace():
    return write_trace


@pytest.fixture(scope="session")
def tiny_trace(tmp_path_factory) -> Path:
    return write_trace(tmp_path_factory.mktemp("traces") / "tiny")
