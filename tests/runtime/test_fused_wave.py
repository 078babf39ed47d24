"""The wave index by kernels against the policy itself, step by step; without a GPU, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from kvtune.attention import group_queries, sparse_attention
from kvtune.caching import simulate
from kvtune.caching.access_log import AccessLog, unit_accesses
from kvtune.errors import InputError
from kvtune.geometry import LayerInfo
from kvtune.policies.wave_index import WaveIndex
from kvtune.runtime.fused_layer import FusedLayer, LayerStore, RangeLayer
from kvtune.runtime.fused_offload import FusedWaveOffload
from kvtune.runtime.fused_wave import FusedWave

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYER = LayerInfo(0, 1, 6, 2, 16, 8, 0.25, item_bytes=4)
POLICY = WaveIndex(retrieval=0.06, estimation=0.2, segment=512, local=16, buffer_clusters=4)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def fused(policy: WaveIndex, new_tokens: int, offload: bool) -> FusedWave:
    if offload:
        return FusedWaveOffload(LAYER, policy, new_tokens, cache_fraction=0.1)
    return FusedWave(LAYER, policy, new_tokens)


class Reference:
    """One sequence under the policy's own code."""

    def __init__(self, policy: WaveIndex, keys: Tensor, values: Tensor) -> None:
        self.policy, self.keys, self.values = policy, keys, values
        self.index = policy.build(keys, values, keys.new_zeros(2, 3, 0, 16), LAYER)

    def extend(self, keys: Tensor, values: Tensor) -> None:
        positions = torch.arange(self.keys.shape[1], self.keys.shape[1] + keys.shape[1], device=DEVICE)
        self.policy.append(self.index, keys, values, positions)
        self.keys = torch.cat([self.keys, keys], 1)
        self.values = torch.cat([self.values, values], 1)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.extend(key[:, None], value[:, None])
        position = torch.tensor([self.keys.shape[1] - 1], device=DEVICE)
        queries = group_queries(query[None], 2)
        self.selection = self.policy.select(self.index, queries, position)
        out, _ = sparse_attention(queries, position, self.keys, self.values, self.selection, LAYER)
        blocks = self.selection.blocks
        return out[0].flatten(0, 1), torch.zeros(2, 0) if blocks is None else blocks[0]


def start(layer: FusedLayer, lengths: list[int], new_tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Prompts of these lengths, given to the layer; returns them."""
    store = LayerStore.empty(LAYER, len(lengths), layer.room(lengths, new_tokens), torch.float32, DEVICE)
    prompts = []
    for sequence, length in enumerate(lengths):
        keys, values = random(2, length, 16, seed=length), random(2, length, 8, seed=length + 1)
        store.put(sequence, 0, keys, values)
        store.lengths[sequence] = length
        prompts.append((keys, values))
    layer.start(store)
    return prompts


def run(layer: FusedWave, references: list[Reference], steps: int, seed: int) -> None:
    """Steps of the layer and of the references, compared."""
    for step in range(steps):
        n = len(references)
        query, key = random(n, 6, 16, seed=seed + step), random(n, 2, 16, seed=seed + step + 100)
        value = random(n, 2, 8, seed=seed + step + 200)
        out = layer.attend(query, key, value).clone()
        layer.join()
        layer.advance()
        for sequence, reference in enumerate(references):
            want, blocks = reference.step(query[sequence], key[sequence], value[sequence])
            torch.testing.assert_close(out[sequence], want, rtol=1e-4, atol=1e-5)
            mine = layer.choice.retrieved[2 * sequence : 2 * sequence + 2]
            for got, wanted in zip(mine.tolist(), blocks.tolist()):
                assert [b for b in got if b >= 0] == [b for b in wanted if b >= 0]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    "changed", [{}, {"estimate": "all"}, {"head_shares": "2,0.3", "spread_correction": 0.6}]
)
def test_steps_of_ragged_sequences_equal_the_policy(offload, changed):
    policy = WaveIndex(**{**POLICY.parameters(), **changed})
    layer, lengths = fused(policy, 8, offload), [1300, 1100]
    references = [Reference(policy, *prompt) for prompt in start(layer, lengths, 8)]
    run(layer, references, 3, seed=5)


@pytest.mark.parametrize(("offload", "shares"), [(False, ""), (True, ""), (False, "0.3,6")])
def test_growth_questions_and_going_back(offload, shares):
    policy = WaveIndex(**{**POLICY.parameters(), "head_shares": shares, "spread_correction": 0.4})
    layer = fused(policy, 2200, offload)
    (prompt,) = start(layer, [1150], 2200)
    reference = Reference(policy, *prompt)
    base = layer.mark()
    for attempt in range(2):
        question = random(2, 1100, 16, seed=attempt), random(2, 1100, 8, seed=attempt + 7)
        layer.extend(0, *question)
        reference.extend(*question)
        assert layer.clusters[0] > POLICY.counts(1150).n_centroids, "the index has not grown"
        run(layer, [reference], 2, seed=30 * attempt)
        keys, values = layer.made(0, 1150)
        torch.testing.assert_close(keys, reference.keys[:, 1150:])
        torch.testing.assert_close(values, reference.values[:, 1150:])
        layer.rewind(base)
        reference = Reference(policy, *prompt)
    run(layer, [reference], 1, seed=99)


@pytest.mark.parametrize("offload", [False, True])
def test_a_short_prompt_is_dense_until_1024_tokens_have_gathered(offload):
    layer = fused(POLICY, 1200, offload)
    (prompt,) = start(layer, [40], 1200)
    reference = Reference(POLICY, *prompt)
    run(layer, [reference], 1, seed=1)
    assert layer.choice.n_tokens.tolist() == [0, 0]
    more = random(2, 1080, 16, seed=3), random(2, 1080, 8, seed=4)
    layer.extend(0, *more)
    reference.extend(*more)
    run(layer, [reference], 1, seed=2)
    assert layer.clusters[0] > 0


def test_the_page_cache_does_what_the_simulator_does():
    layer = fused(POLICY, 8, offload=True)
    (prompt,) = start(layer, [1300], 8)
    reference, at = Reference(POLICY, *prompt), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    layer.log = layer.new_log(at, 6)
    accesses: list[list] = [[], []]
    for step in range(6):
        run(layer, [reference], 1, seed=step // 2)  # every query twice: some clusters hit
        at += 1
        for head in range(2):
            accesses[head].append(unit_accesses(reference.selection, head, 1300))
    log = AccessLog(LAYER.page_bytes)
    for head in range(2):
        got = layer.log.accesses(head, 6, 1300)
        assert got.blocks.tolist() == [b for part in accesses[head] for b in part.blocks]
        assert got.pages.tolist() == [b for part in accesses[head] for b in part.pages]
        log.units[0, 0, 0, head] = got
    (result,) = simulate(log, [0.1], "wave", keep_hits=True)
    hits = 0
    for head in range(2):
        pages = result.units[0, 0, 0, head].page_hits
        first = log.units[0, 0, 0, head].pages.cumsum() - log.units[0, 0, 0, head].pages
        assert pages[first].tolist() == layer.log.hit_mask(head, 6)
        hits += int(pages.sum())
    assert hits > 0
    counted = layer.cache.counters().sum(0)
    assert counted[1].tolist() == [hits, int(sum(a.pages.sum() for _, a in log))]


@pytest.mark.parametrize(("sink", "window"), [(0, None), (4, 50), (0, 50)])
def test_a_range_of_tokens(sink, window):
    layer = RangeLayer(LAYER, sink, window)
    prompts = start(layer, [90, 20], 4)
    keys, values = [p[0] for p in prompts], [p[1] for p in prompts]
    for step in range(3):
        query, key, value = (
            random(2, 6, 16, seed=step),
            random(2, 2, 16, seed=step + 9),
            random(2, 2, 8, seed=step),
        )
        out = layer.attend(query, key, value)
        layer.advance()
        for s in range(2):
            keys[s] = torch.cat([keys[s], key[s, :, None]], 1)
            values[s] = torch.cat([values[s], value[s, :, None]], 1)
            n = keys[s].shape[1]
            kept = [p for p in range(n) if window is None or p < sink or p >= n - window]
            scores = torch.einsum("hgd,hnd->hgn", query[s].view(2, 3, 16).double(), keys[s][:, kept].double())
            want = torch.softmax(0.25 * scores, -1) @ values[s][:, kept].double()
            torch.testing.assert_close(out[s].double(), want.flatten(0, 1), rtol=1e-5, atol=1e-5)


def test_what_the_kernels_do_not_model_is_refused():
    with pytest.raises(InputError, match="does not serve"):
        FusedWave(LAYER, WaveIndex(refresh=8), 4)
