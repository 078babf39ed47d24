"""The device's page cache against the live block cache, step by step, with every slot accounted for."""

from __future__ import annotations

import random
from itertools import accumulate
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.errors import InputError
from kvtune.geometry import PAGE_TOKENS
from kvtune.runtime.block_cache import BlockCache

pytest.importorskip("triton")
from kvtune.kernels import page_cache as kernels
from kvtune.kernels.fetch import Grid
from kvtune.runtime.page_cache import PageCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIM, VALUE_DIM = 8, 4
GRID = Grid(programs=2, pages=16)
"""Few programs: the interpreter runs them one by one."""


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


class Layer:
    """A page cache, its store and its pool, beside one block cache a unit; ``sizes`` are [U][C]."""

    def __init__(self, sizes, capacity, buffer_pages, ranks, room=0):
        self.units, self.ranks = len(sizes), ranks
        clusters = len(sizes[0]) + room
        rows = max(map(sum, sizes)) + 20 * room
        self.cache = PageCache(self.units, capacity, buffer_pages, clusters, rows, ranks, DEVICE)
        self.slow = [BlockCache(capacity) for _ in sizes]
        generator = torch.Generator().manual_seed(7)
        self.keys = torch.randn(self.units, rows, DIM, generator=generator)
        self.values = torch.randn(self.units, rows, VALUE_DIM, generator=generator)
        if DEVICE == "cuda":
            self.keys, self.values = self.keys.pin_memory(), self.values.pin_memory()
        pool_rows = self.cache.slots * PAGE_TOKENS + 3
        self.pool_keys = torch.full((self.units, pool_rows, DIM), torch.nan, device=DEVICE)
        self.pool_values = torch.full((self.units, pool_rows, VALUE_DIM), torch.nan, device=DEVICE)
        self.memory = (self.keys, self.values, self.pool_keys, self.pool_values)
        self.offsets = torch.zeros(self.units, clusters + 1, dtype=torch.int64, device=DEVICE)
        self.set_sizes(sizes)

    def set_sizes(self, sizes):
        self.sizes = sizes
        tensor = torch.tensor(sizes, device=DEVICE)
        self.offsets[:, 1 : tensor.shape[1] + 1] = tensor.cumsum(1)
        self.cache.set_clusters(tensor)

    def steps(self, wanted):
        for clusters in wanted:
            self.step(clusters)

    def step(self, wanted):
        """One step for the clusters wanted [U][…]; returns what the lookup found."""
        found = self.cache.lookup(self.ranked(wanted), self.offsets)
        kept = [self.truncated(unit, clusters) for unit, clusters in enumerate(wanted)]
        for unit, clusters in enumerate(kept):
            tokens = [self.sizes[unit][cluster] for cluster in clusters]
            hits = self.slow[unit].access(clusters, [pages_of(n) for n in tokens], tokens)
            assert found.hits[unit].tolist() == hits + [0] * (self.ranks - len(hits))
            missing = sum(pages_of(n) for n, hit in zip(tokens, hits) if not hit)
            assert found.n_fetch[unit] == missing
            assert found.n_rows[unit] == sum(tokens) and found.n_kept[unit] == len(clusters)
        self.cache.fetch(found, *self.memory, GRID)
        for unit, clusters in enumerate(kept):
            self.check_rows(found.rows[unit].tolist(), unit, clusters)
        self.cache.update(found)
        for unit, slow in enumerate(self.slow):
            slow.update()
            self.check_state(unit, slow)
        return found

    def ranked(self, wanted):
        padded = [[*clusters, *[-1] * (self.ranks - len(clusters))] for clusters in wanted]
        return torch.tensor(padded, dtype=torch.int32, device=DEVICE)

    def truncated(self, unit, clusters):
        """The first clusters that fit the execution buffer."""
        pages = [pages_of(self.sizes[unit][cluster]) for cluster in clusters]
        return [c for c, total in zip(clusters, accumulate(pages)) if total <= self.cache.buffer_pages]

    def check_rows(self, rows, unit, clusters):
        """Each token's pool row, in rank order, holds what the store holds."""
        offsets = self.offsets[unit].tolist()
        stored = [row for c in clusters for row in range(offsets[c], offsets[c + 1])]
        assert rows[len(stored) :] == [-1] * (len(rows) - len(stored))
        assert len(set(rows[: len(stored)])) == len(stored)
        self.check_data(unit, rows[: len(stored)], stored)

    def check_data(self, unit, pool_rows, stored):
        assert torch.equal(self.pool_keys[unit, pool_rows].cpu(), self.keys[unit, stored])
        assert torch.equal(self.pool_values[unit, pool_rows].cpu(), self.values[unit, stored])

    def check_state(self, unit, slow):
        """Order and use are the block cache's; slots are either free or a resident page's, once each."""
        state = self.cache.state
        residents = state.order[unit, : state.n_resident[unit]].tolist()
        assert residents == list(slow._pages)
        assert state.used[unit] == slow.used <= self.cache.capacity
        starts, offsets = state.page_offsets[unit].tolist(), self.offsets[unit].tolist()
        slot_of = state.page_slot[unit].tolist()
        held: dict[int, int] = {}
        pool_rows, stored = [], []
        for cluster in residents:
            held.update((page, slot_of[page]) for page in range(starts[cluster], starts[cluster + 1]))
            for token, row in enumerate(range(offsets[cluster], offsets[cluster + 1])):
                slot = slot_of[starts[cluster] + token // PAGE_TOKENS]
                pool_rows.append(slot * PAGE_TOKENS + token % PAGE_TOKENS)
                stored.append(row)
        self.check_data(unit, pool_rows, stored)
        assert {page: slot for page, slot in enumerate(slot_of) if slot != -1} == held
        free = state.free[unit, : state.n_free[unit]].tolist()
        assert sorted(free + list(held.values())) == list(range(self.cache.slots))
        counters = slow.counters
        assert self.cache.counters()[unit].tolist() == [counters.requests, counters.pages, counters.tokens]


@st.composite
def runs(draw):
    """Ragged sizes of one unit, a capacity and a buffer in pages, and what each step wants."""
    sizes = draw(st.lists(st.integers(1, 20), min_size=1, max_size=9))
    wanted = st.lists(st.sampled_from(range(len(sizes))), max_size=5, unique=True)
    steps = draw(st.lists(wanted, min_size=1, max_size=8))
    return sizes, draw(st.integers(1, 12)), draw(st.integers(1, 10)), steps


@settings(max_examples=15, deadline=None)
@given(run=runs(), block=st.sampled_from([2, 4, kernels.BLOCK]))
def test_every_access_follows_the_block_cache(run, block):
    sizes, capacity, buffer_pages, steps = run
    with mock.patch.object(kernels, "BLOCK", block):
        Layer([sizes], capacity, buffer_pages, ranks=5).steps([wanted] for wanted in steps)


def random_steps(seed, n_steps, units, n_clusters, most):
    draw = random.Random(seed)
    for _ in range(n_steps):
        yield [draw.sample(range(n_clusters), draw.randint(0, most)) for _ in range(units)]


def test_units_go_their_own_ways(monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 4)
    draw = random.Random(1)
    sizes = [[draw.randint(1, 30) for _ in range(12)] for _ in range(3)]
    Layer(sizes, capacity=11, buffer_pages=9, ranks=6).steps(random_steps(2, 8, 3, 12, 6))


@pytest.mark.parametrize(
    ("sizes", "capacity", "resident"),
    [([20, 30, 25, 17], 2, 0), ([9, 16, 3, 8, 1, 24], 12, 6), ([8] * 9, 1, 1), ([40, 30, 5, 50, 8], 4, 2)],
    ids=["none fits", "all fit", "one page", "some never fit"],
)
def test_edges_of_capacity(sizes, capacity, resident):
    layer = Layer([sizes], capacity, buffer_pages=12, ranks=4)
    layer.steps(random_steps(3, 6, 1, len(sizes), 4))
    layer.step([[len(sizes) - 1]])
    layer.step([[2]])
    assert layer.cache.state.n_resident.item() == resident


def test_a_large_cache_fills_and_turns_over():
    draw = random.Random(4)
    sizes = [[draw.choice([3, 8, 8, 13]) for _ in range(6000)]]
    layer = Layer(sizes, capacity=4096, buffer_pages=1400, ranks=1024)
    for begin in (0, 950, 1900, 2850, 3800, 3500):
        layer.step([draw.sample(range(begin, begin + 1000), 1000)])
    assert layer.cache.state.used.item() > 4090


def test_the_cluster_set_grows_and_residents_stay():
    layer = Layer([[9, 4, 17], [5, 8, 0]], capacity=6, buffer_pages=8, ranks=4, room=2)
    layer.steps([[[2, 0], [1]], [[1], [0]]])
    before = layer.cache.state.order.clone()
    layer.set_sizes([[9, 4, 17, 12, 3], [5, 8, 1, 0, 20]])
    assert torch.equal(layer.cache.state.order, before)
    found = layer.step([[0, 3, 4, 1], [1, 4, 2]])
    assert found.hits.tolist() == [[1, 0, 0, 1], [1, 0, 0, 0]]
    layer.step([[4, 3], [2, 0, 4]])


def test_reset_forgets():
    layer = Layer([[9, 4, 17]], capacity=4, buffer_pages=8, ranks=3)
    layer.steps([[[2, 0]], [[1, 0]]])
    layer.cache.reset()
    layer.slow = [BlockCache(4)]
    layer.set_sizes([[4, 11, 9]])
    layer.steps([[[1, 0]], [[1, 2]]])


def test_what_exceeds_the_buffer_is_left_out():
    layer = Layer([[8, 24, 8, 8]], capacity=9, buffer_pages=3, ranks=4)
    found = layer.step([[0, 2, 1, 3]])
    assert found.n_rows.item() == 16
    assert layer.step([[1]]).n_fetch.item() == 3


def test_a_second_update_changes_nothing():
    layer = Layer([[8, 24, 9]], capacity=4, buffer_pages=8, ranks=3)
    layer.cache.update(layer.step([[2, 0]]))
    layer.check_state(0, layer.slow[0])
    layer.step([[1, 2]])


def test_bad_sizes_are_refused():
    with pytest.raises(InputError, match="capacity of at least 1, not 0"):
        PageCache(1, 0, 4, 8, 8, 2, DEVICE)
    cache = PageCache(2, 4, 4, 3, 8, 2, DEVICE)
    with pytest.raises(InputError, match="cannot take cluster sizes"):
        cache.set_clusters(torch.ones(2, 4))
    with pytest.raises(InputError, match="9 pages in a unit exceed the maximum of 8"):
        cache.set_clusters(torch.tensor([[8, 8], [64, 1]]))
    cache.set_clusters(torch.tensor([[8, 8], [9, 0]]))
    with pytest.raises(InputError, match="2 clusters that the page cache already has"):
        cache.set_clusters(torch.tensor([[9, 8, 1], [9, 0, 2]]))
    with pytest.raises(InputError, match="cannot take cluster sizes"):
        cache.set_clusters(torch.tensor([[8], [9]]))
    offsets = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    with pytest.raises(InputError, match="must be int32"):
        cache.lookup(torch.zeros(2, 2, dtype=torch.int64, device=DEVICE), offsets)
    with pytest.raises(InputError, match="one offset more"):
        cache.lookup(torch.zeros(2, 2, dtype=torch.int32, device=DEVICE), offsets[:, :2])


def test_state_is_counted_in_bytes():
    cache = PageCache(2, 4, 3, 5, 9, 3, DEVICE)
    state = 6 + 9 + 7 + 1 + 4 + 1 + 1 + 5 + 1 + 2 * 6 + 6 * 4 + 2 * 8
    lookup = 3 + 1 + 3 * 3 + 1 + 24 + 1
    assert cache.device_bytes == 2 * (4 * (state + lookup) + 3)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_whole_step_in_a_graph():
    """Recorded once, replayed for other clusters; the update on a stream of its own."""
    draw = random.Random(6)
    sizes = [[draw.randint(1, 30) for _ in range(40)] for _ in range(3)]
    layer = Layer(sizes, capacity=30, buffer_pages=24, ranks=8)
    cache = layer.cache
    retrieved = layer.ranked([[], [], []])

    def step():
        found = cache.lookup(retrieved, layer.offsets)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            cache.update(found)
        cache.fetch(found, *layer.memory)
        torch.cuda.current_stream().wait_stream(side)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for wanted in random_steps(7, 30, 3, 40, 8):
        retrieved.copy_(layer.ranked(wanted))
        graph.replay()
        for unit, clusters in enumerate(wanted):
            kept = layer.truncated(unit, clusters)
            tokens = [sizes[unit][cluster] for cluster in kept]
            layer.check_rows(cache.found.rows[unit].tolist(), unit, kept)
            layer.slow[unit].access(kept, [pages_of(n) for n in tokens], tokens)
            layer.slow[unit].update()
            layer.check_state(unit, layer.slow[unit])
