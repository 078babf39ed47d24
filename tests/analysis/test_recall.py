"""Recall through the top-k kernels equals recall through scores; best tokens are found once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvtune.analysis import recall
from kvtune.analysis.recall import recalls
from kvtune.geometry import LayerInfo
from kvtune.policies.base import Selection

pytest.importorskip("triton")

N, HEADS, GROUP = 150, 1, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Layer:
    """What :func:`recalls` reads of a recorded layer."""

    keys: Tensor
    info: LayerInfo

    @property
    def key_positions(self) -> Tensor:
        return torch.arange(self.keys.shape[1], device=self.keys.device)


def layer(window: int | None) -> Layer:
    """Keys whose products with (±1, 0, …) are whole numbers, no two alike."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.zeros(HEADS, N, 16)
    for head in range(HEADS):
        keys[head, :, 0] = torch.randperm(N, generator=generator) - 70.0
    info = LayerInfo(0, 1, HEADS * GROUP, HEADS, 16, 16, scaling=0.5, window=window, softcap=200.0)
    return Layer(keys.half().to(DEVICE), info)


def asked() -> tuple[Tensor, Tensor]:
    queries = torch.zeros(3, HEADS, GROUP, 16)
    queries[..., 0] = torch.tensor([1.0, -1.0])
    return queries.half().to(DEVICE), torch.tensor([40, 120, 149], device=DEVICE)


def selection() -> Selection:
    """Three steady tokens, then others."""
    generator = torch.Generator().manual_seed(1)
    chosen = torch.stack([torch.randperm(40, generator=generator)[:25] for _ in range(3 * HEADS)])
    positions = chosen.view(3, HEADS, 25).to(DEVICE)
    positions[:, :, -4:] = -1
    return Selection(positions, torch.zeros(3, HEADS, dtype=torch.int64, device=DEVICE), resident=3)


@pytest.mark.parametrize("window", [None, 30])
def test_kernels_and_scores_agree(monkeypatch, window):
    given = (layer(window), *asked(), selection())
    monkeypatch.setattr(recall, "_has_kernel", lambda *_: False)
    want = recalls(*given)
    monkeypatch.setattr(recall, "_has_kernel", lambda *_: True)
    got = recalls(*given)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert want[0].min() < want[1].max() < 1


def test_known_best_tokens_are_not_searched_again(monkeypatch):
    given = (layer(None), *asked(), selection())
    first = recalls(*given)
    wrong = torch.full_like(first[2], -1)
    again = recalls(*given, known=wrong)
    assert torch.equal(again[0], first[0]) and (again[1] == 1).all() and again[2] is wrong
    assert torch.equal(recalls(*given, known=first[2])[1], first[1])


def test_without_a_gpu_scores_are_ranked():
    queries, _ = asked()
    assert recall._has_kernel(queries, layer(None).keys, layer(None).info) == torch.cuda.is_available()
    biased = LayerInfo(0, 1, 2, 1, 16, 16, scaling=0.5, alibi=(0.5,) * 2)
    assert not recall._has_kernel(queries, layer(None).keys, biased)
