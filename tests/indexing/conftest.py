"""A trace whose prompts are long enough to index: two samples, two open layers and a windowed one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvtune.geometry import ModelGeometry
from kvtune.traces import TraceWriter

PROMPT, ANSWER, DIM = 300, 6, 16
GEOMETRY = ModelGeometry(
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=DIM,
    value_dim=DIM,
    dtype="bfloat16",
    max_positions=4096,
    scaling=DIM**-0.5,
    windows=(None, None, 24),
    softcaps=(None, None, None),
    sinks=(False, False, False),
)


def write_trace(path: Path, layers: tuple[int, ...] = (0, 1, 2), seed: int = 0, decode: bool = True) -> Path:
    """Random keys around 12 centres; one request of one turn (without ``decode``: prompt queries)."""
    header = {
        "model": "tiny-random",
        "fingerprint": "0123456789abcdef",
        "geometry": GEOMETRY.to_dict(),
        "dtype": "bfloat16",
        "layers": list(layers),
        "kv_heads": [0, 1],
        "values": False,
    }
    writer = TraceWriter(path, header)
    for number in range(2):
        with writer.sample(number) as sample:
            generator = torch.Generator().manual_seed(seed + number)
            parent, start = -1, 0
            for kind, length in (("context", PROMPT - 10), ("question", 10), ("generated", ANSWER)):
                ids = torch.randint(0, 99, (length,), generator=generator)
                parent = sample.segment(
                    kind=kind, request=0, turn=0, parent=parent, start=start, token_ids=ids
                )
                for layer in layers:
                    centres = 2 * torch.randn(2, 12, DIM, generator=torch.Generator().manual_seed(layer))
                    which = torch.randint(0, 12, (length,), generator=generator)
                    keys = centres[:, which] + torch.randn(2, length, DIM, generator=generator)
                    sample.keys_values(layer, parent, keys.bfloat16(), None)
                    if kind == ("generated" if decode else "question"):
                        asked = 2 * torch.randn(length, 4, DIM, generator=generator)
                        positions = torch.arange(start, start + length)
                        steps = torch.arange(length) if decode else torch.full((length,), -1)
                        sample.queries(layer, parent, positions, steps, 0, asked.bfloat16())
                start += length
            sample.record(0, 0, "random", reference="yes", generated="yes", score=None)
    writer.finish()
    return path


@pytest.fixture(scope="session")
def make_trace():
    return write_trace


@pytest.fixture(scope="session")
def trace_path(tmp_path_factory) -> Path:
    return write_trace(tmp_path_factory.mktemp("indexing") / "tiny.trace")
