"""The wave index by kernels: scan, choose, then attend what the clusters hold, estimates merged in.

The same index and the same order of decisions as :class:`kvtune.policies.wave_index.WaveIndex`, whose
``build`` makes it. All sizes that change while decoding are device data, so that one captured step serves to
the end of the run; the index grows in place.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvtune.errors import InputError
from kvtune.geometry import LayerInfo
from kvtune.kernels.attend import Estimate, Rows, SparseAttention
from kvtune.kernels.choose import PLAN, Choice, choose, cut
from kvtune.kernels.scan import centroid_logits, empty_stats
from kvtune.policies import retroinfer
from kvtune.policies.base import Clusters
from kvtune.policies.wave_index import WaveIndex
from kvtune.policies.wave_state import WaveIndexState
from kvtune.runtime.fused_layer import FusedLayer, LayerStore, nbytes


def serves(policy: WaveIndex) -> bool:
    """Whether the fused path models these parameters (neither pinned spans nor periodic full steps)."""
    return not policy.pinned and not policy.refresh


class FusedWave(FusedLayer):
    """One layer of B sequences under a wave index, keys and values kept on the device.

    The store's rows are put in the order of the clusters, so that a cluster is one run of rows; sinks and the
    dense tail stay where they are.

    ``new_tokens`` bounds the decode steps to come: buffers are sized for the growth they bring.
    """

    def __init__(self, info: LayerInfo, policy: WaveIndex, new_tokens: int) -> None:
        if not serves(policy):
            raise InputError("the fused engine serves neither pinned spans nor refresh", "use --engine torch")
        self.info, self.policy = info, policy
        self.new_tokens = new_tokens

    def start(self, store: LayerStore) -> None:
        self.store = store
        self.batch = len(store.lengths)
        self.states = []
        for sequence in range(self.batch):
            keys, values = store.of(sequence)
            heads, _, dim = keys.shape
            none = keys.new_zeros(heads, self.info.group, 0, dim)
            self.states.append(self.policy.build(keys, values, none, self.info))
        self._reserve()
        for sequence, state in enumerate(self.states):
            self._load(sequence, state)
            state.tail_keys, state.tail_values = keys[:, :0], values[:, :0]  # the store has them

    def _reserve(self) -> None:
        """Buffers for the longest sequence and all growth to come."""
        store, info, policy = self.store, self.info, self.policy
        device, units = store.keys.device, len(store.keys)
        counts = [policy.counts(state.context) for state in self.states]
        growth = counts[0].growth
        longest_tail = max(n - state.tail_start for n, state in zip(store.lengths, self.states))
        grown = max(0, (longest_tail + self.new_tokens - policy.local) // retroinfer.UPDATE_TOKENS)
        clusters = max(c.n_centroids for c in counts) + grown * growth.centroids
        nprobe = max(c.nprobe for c in counts) + grown * growth.nprobe
        es = clusters if policy.estimate == "all" else max(c.es for c in counts) + grown * growth.es
        buffer = max(4 * nprobe, *(c.buffer_clusters for c in counts)) * counts[0].pages_per_cluster
        self.counts = counts

        def ints(*shape: int) -> Tensor:
            return torch.zeros(units, *shape, dtype=torch.int32, device=device)

        dtype = store.keys.dtype
        self.centroids = torch.zeros(units, clusters, info.head_dim, dtype=dtype, device=device)
        self.value_sums = torch.zeros(units, clusters, info.value_dim, dtype=dtype, device=device)
        self.sizes, self.offsets = ints(clusters), ints(clusters + 1)
        self.visible, self.plan = ints(), ints(PLAN)
        self.resident = ints(4)
        self.logits = torch.zeros(units, info.group, max(clusters, 1), device=device)
        self.stats = empty_stats(units, info.group, clusters, device)
        self.choice = Choice.empty(units, clusters, nprobe, es, device)
        listed = ints(max(8 * buffer, 1))
        resident = policy.sink + policy.local + retroinfer.UPDATE_TOKENS
        longest = max(longest_tail + policy.sink + 1, resident)
        self.rows = Rows(self.resident, listed, self.choice.n_tokens, longest)
        # What usually comes; the kernels serve any count up to the buffers.
        usual = (
            nprobe * policy.tokens_per_centroid + policy.sink + policy.local + retroinfer.UPDATE_TOKENS // 2
        )
        bound = longest + listed.shape[1]
        self.attention = SparseAttention(
            units, info.group, info.value_dim, bound, es, device, usual_exact=min(usual, bound)
        )
        self.out = torch.empty(units, info.group, info.value_dim, dtype=store.values.dtype, device=device)

    def _load(self, sequence: int, state: WaveIndexState, at: int = 0) -> None:
        """Copy the clusters of ``state`` behind the first ``at`` of the sequence, and set its plan."""
        heads = self.info.n_kv_heads
        units = slice(sequence * heads, (sequence + 1) * heads)
        more = state.clusters.sizes.shape[1]
        where = slice(at, at + more)
        self.centroids[units, where] = state.clusters.centroids
        self.value_sums[units, where] = state.clusters.value_sums
        self.sizes[units, where] = state.clusters.sizes.int()
        start = int(self.offsets[units.start, at]) if at else state.sink
        self.offsets[units, at] = start
        self.offsets[units, at + 1 : at + more + 1] = start + state.offsets[:, 1:].int()
        members = slice(start, start + state.order.shape[1])
        for rows in (self.store.keys, self.store.values):
            wanted = state.order[..., None].expand(-1, -1, rows.shape[2])
            rows[units, members] = torch.gather(rows[units], 1, wanted)
        self._plan(sequence, at + more, state.tail_start)

    def _plan(self, sequence: int, clusters: int, tail_start: int) -> None:
        heads = self.info.n_kv_heads
        units = slice(sequence * heads, (sequence + 1) * heads)
        counts, state = self.counts[sequence], self.states[sequence]
        grown = (tail_start - state.prompt_end) // retroinfer.UPDATE_TOKENS
        nprobe = counts.nprobe + grown * counts.growth.nprobe if clusters else 0
        es = clusters if self.policy.estimate == "all" else counts.es + grown * counts.growth.es
        room = max(counts.buffer_clusters, 4 * nprobe) * counts.pages_per_cluster
        self.visible[units] = clusters
        self.plan[units] = torch.tensor(
            [clusters, nprobe, es, room], dtype=torch.int32, device=self.plan.device
        )
        row = [0, state.sink, tail_start, self.store.lengths[sequence]]
        self.resident[units] = torch.tensor(row, dtype=torch.int32, device=self.plan.device)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        info, choice, attention = self.info, self.choice, self.attention
        grouped = queries.reshape(-1, info.group, info.head_dim)
        with attention.beside():
            self.store.append(keys, values, self.resident)
        centroid_logits(grouped, self.centroids, self.visible, self.logits, self.stats, info.scaling)
        choose(self.logits, self.stats, self.sizes, self.plan, choice)
        with attention.beside():
            attention.estimate(
                Estimate(self.logits, self.sizes, self.value_sums, choice.estimated, choice.n_estimated)
            )
        cut(choice, self.sizes, self.plan, self.offsets, self.rows.listed)
        attention(
            grouped, self.store.keys, self.store.values, self.rows, self.out, info.scaling, choice.n_estimated
        )
        return self.out.view(len(queries), -1, info.value_dim)

    def advance(self) -> None:
        """Count the step; where 1,024 tokens have left the local window, they become one more segment."""
        for sequence, state in enumerate(self.states):
            self.store.lengths[sequence] += 1
            if (
                self.store.lengths[sequence] - state.tail_start
                >= retroinfer.UPDATE_TOKENS + self.policy.local
            ):
                self._grow(sequence, state)

    def _grow(self, sequence: int, state: WaveIndexState) -> None:
        keys, values = self.store.of(sequence)
        start, stop = state.tail_start, state.tail_start + retroinfer.UPDATE_TOKENS
        more = replace(
            state,
            clusters=Clusters(
                state.clusters.centroids[:, :0], state.clusters.sizes[:, :0], state.clusters.value_sums[:, :0]
            ),
            order=state.order[:, :0],
            offsets=state.offsets[:, :1] * 0,
        )
        growth = self.counts[sequence].growth
        more.add(keys[:, start:stop], values[:, start:stop], start, growth.centroids, 1)
        state.tail_start = more.tail_start = stop
        self._load(sequence, more, int(self.visible[sequence * self.info.n_kv_heads]))

    def gpu_bytes(self) -> dict[str, int]:
        index = nbytes(self.centroids, self.value_sums, self.sizes, self.offsets)
        buffers = nbytes(self.logits, self.rows.listed, self.attention.sums, self.choice.estimated)
        return {"kv": nbytes(self.store.keys, self.store.values), "index": index, "buffers": buffers}
