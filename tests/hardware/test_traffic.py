"""Traffic and memory without a trace against what the policy itself selects and keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from machines import GEOMETRY, machine

from kvtune.hardware import (
    SequenceMemory,
    estimated_parameters,
    full_memory,
    full_traffic,
    max_batch,
    wave_memory,
    wave_traffic,
)
from kvtune.policies import get_policy
from kvtune.policies.wave_index import WaveIndex

LAYER = GEOMETRY.layer(0)


@pytest.mark.parametrize("estimate", ["budget", "all"])
@pytest.mark.parametrize("step", [0, 1, 1023, 1024, 1500])
def test_the_wave_index_without_a_trace(step, estimate):
    """Scan, estimates, resident tokens and blocks are exact; pages follow from the pages of a cluster."""
    policy, context = WaveIndex(retrieval=0.05, estimate=estimate, spread_correction=step % 2), 1700
    generator = torch.Generator().manual_seed(step)
    keys = torch.randn(2, context + step + 1, 16, generator=generator).bfloat16()
    index = policy.build(keys[:, :context], keys[:, :context], keys[:, None, :0], LAYER)
    policy.append(index, keys[:, context:], keys[:, context:], torch.arange(context, context + step + 1))
    selection = policy.select(
        index, torch.randn(1, 2, 2, 16, generator=generator), torch.tensor([context + step])
    )
    assert selection.block_pages is not None and selection.blocks is not None
    pages, blocks = selection.block_pages.sum().item(), (selection.blocks >= 0).sum().item()
    found = wave_traffic(GEOMETRY, context, policy, step=step, cluster_pages=pages / blocks, hit_ratio=0.25)[
        0
    ]
    assert found.scan_bytes == selection.scan_bytes.sum()
    estimates = (selection.read_bytes(LAYER) - selection.scan_bytes).sum() - found.exact_bytes
    # Empty clusters are neither retrieved nor estimated; random keys leave none or a few.
    assert float(estimates) == pytest.approx(found.estimation_bytes, rel=0.02)
    assert found.exact_bytes == pytest.approx(float((selection.pages() * LAYER.page_bytes).sum()))
    assert found.blocks == blocks
    assert found.attended <= found.exact_bytes and found.fetched <= found.missed_bytes
    assert found.missed_bytes == pytest.approx(0.75 * pages * LAYER.page_bytes)


def test_pages_of_a_cluster_by_default():
    """Clusters of every size from 1 to 32 tokens: 7/16 of a page more than their tokens fill."""
    sizes = torch.arange(1, 33)
    mean = ((sizes + 7) // 8).double().mean().item()
    policy, context = WaveIndex(), 120_000
    counts = policy.counts(context)
    each = (context - 68) / counts.n_centroids / 8 + (mean - sizes.double().mean().item() / 8)
    found = wave_traffic(GEOMETRY, context, policy)[0]
    assert found.missed_bytes == pytest.approx(2 * counts.nprobe * each * LAYER.page_bytes)
    tokens = counts.nprobe * (context - 68) / counts.n_centroids
    assert found.fetched == pytest.approx(2 * tokens * LAYER.token_bytes)
    assert found.attended == pytest.approx(2 * (tokens + 69) * LAYER.token_bytes)


def test_windows_dense_layers_and_short_prompts_are_dense():
    traffic = wave_traffic(GEOMETRY, 8192, dense_layers=[1], step=7)
    assert [layer.dense for layer in traffic] == [False, True, True]
    assert traffic[1:] == full_traffic(GEOMETRY, 8200)[1:]
    assert traffic[2].exact_bytes == 128 * 2 * 64
    assert wave_traffic(GEOMETRY, 900) == full_traffic(GEOMETRY, 901)


@given(st.integers(2000, 200_000), st.floats(0.002, 0.2), st.floats(0, 0.5), st.integers(0, 3000))
def test_wider_zones_never_move_less(context, retrieval, estimation, step):
    def moved(policy: WaveIndex, hits: float = 0.5) -> list[float]:
        layer = wave_traffic(GEOMETRY, context, policy, hit_ratio=hits, step=step)[0]
        return [layer.scan_bytes, layer.estimation_bytes, layer.exact_bytes, layer.missed_bytes]

    plain = WaveIndex(retrieval=retrieval, estimation=estimation)
    more = moved(replace(plain, retrieval=min(1.0, 2 * retrieval)))
    assert more[2] >= moved(plain)[2] and more[3] >= moved(plain)[3]
    assert moved(replace(plain, estimation=estimation + 0.3))[1] >= moved(plain)[1]
    assert moved(plain, 0.9)[3] <= moved(plain)[3]


def test_wave_memory_is_what_the_policy_keeps():
    policy, context = WaveIndex(), 3000
    keys = torch.randn(2, context, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    index = policy.build(keys, keys, keys[:, None, :0], LAYER)
    counts = policy.counts(context)
    memory = wave_memory(GEOMETRY, context, policy, cache_fraction=0.1, new_tokens=0)
    assert memory.index == 2 * policy.index_bytes(index, LAYER)  # two layers, the third has a window
    assert memory.steady == 2 * 2 * 68 * 64
    assert memory.cache == 2 * 2 * round(0.1 * context / 8) * 512
    assert memory.buffer == 2 * counts.buffer_pages * 512
    assert memory.kv == 128 * 2 * 64
    kept = wave_memory(GEOMETRY, context, policy, new_tokens=0, offload="none")
    assert kept.to_dict() == {
        "index": memory.index, "steady": 0, "cache": 0, "buffer": 0,
        "kv": full_memory(GEOMETRY, context).total, "total": kept.total,
    }  # fmt: skip
    assert kept.total > memory.total


def test_max_batch():
    plain = machine()  # 10 GiB, of which 1 is reserved
    gib = float(2**30)
    assert max_batch(plain, SequenceMemory(kv=gib), 2 * gib) == 7
    assert max_batch(plain, SequenceMemory(kv=gib), 9.5 * gib) == 0
    assert max_batch(plain, SequenceMemory(kv=0.5 * gib, index=0.5 * gib, buffer=0.1 * gib), 0.0) == 8


@given(st.floats(1e6, 1e9), st.floats(0, 1e9), st.floats(0, 1e10), st.floats(0, 1e9))
def test_more_memory_never_fits_more_sequences(each, more, weights, heavier):
    plain = machine()
    least = max_batch(plain, SequenceMemory(kv=each + more), weights + heavier)
    assert least <= max_batch(plain, SequenceMemory(kv=each), weights)


@given(st.integers(2000, 100_000), st.floats(0.01, 0.4))
def test_a_larger_cache_never_fits_more_sequences(context, fraction):
    plain = machine()
    small = wave_memory(GEOMETRY, context, cache_fraction=fraction)
    large = wave_memory(GEOMETRY, context, cache_fraction=2 * fraction)
    assert max_batch(plain, large, 1e9) <= max_batch(plain, small, 1e9)


def test_estimated_parameters():
    """Llama 3 8B: 8.03e9 parameters, of which 1.05e9 are embeddings."""
    llama = replace(
        GEOMETRY, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, value_dim=128, windows=(None,) * 32
    )
    assert estimated_parameters(llama) == pytest.approx(8.03e9 - 1.05e9, rel=0.01)


def test_full_policy_agrees_with_full_traffic():
    keys = torch.randn(2, 300, 16).bfloat16()
    policy = get_policy("full")
    for number in (0, 2):
        layer = GEOMETRY.layer(number)
        selection = policy.select(layer, torch.randn(1, 2, 2, 16), torch.tensor([len(keys[0]) - 1]))
        tokens = selection.exact_tokens().sum().item()
        assert full_traffic(GEOMETRY, 300)[number].exact_bytes == tokens * layer.token_bytes
