"""The wave index by kernels: scan, choose, then attend what the clusters hold, estimates merged in.

The same index and the same order of decisions as :class:`kvtune.policies.wave_index.WaveIndex`, whose
``build`` makes it. All sizes that change while decoding are device data, so that one captured step serves to
the end of the run; the index grows in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

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
from kvtune.runtime.fused_layer import FusedLayer, LayerStore, int_row, nbytes
from kvtune.runtime.step_log import StepLog

SEGMENT = retroinfer.UPDATE_TOKENS


def serves(policy: WaveIndex, info: LayerInfo) -> bool:
    """Whether the fused path models this: neither pinned spans, periodic full steps nor position biases."""
    plain = info.softcap is None and info.alibi is None and info.sinks is None
    return plain and not policy.pinned and not policy.refresh


class FusedWave(FusedLayer):
    """One layer of B sequences under a wave index, keys and values kept on the device.

    The prompt's rows are put in the order of its clusters, so that a cluster is one run of rows; sinks and
    what follows the prompt's clusters stay where they are. Clusters made while decoding are copies behind
    them. ``new_tokens`` bounds the tokens to come.
    """

    def __init__(self, info: LayerInfo, policy: WaveIndex, new_tokens: int) -> None:
        if not serves(policy, info):
            raise InputError("the fused engine does not serve this wave index", "use --engine torch")
        self.info, self.policy = info, policy
        self.new_tokens = new_tokens

    def build(self, store: LayerStore, prompt_queries: list[Tensor] | None = None) -> None:
        self.store = store
        self.prompts = list(store.lengths)
        self.states = []
        for sequence in range(len(store.lengths)):
            keys, values = store.of(sequence)
            none = keys.new_zeros(len(keys), self.info.group, 0, keys.shape[2])
            self.states.append(self.policy.build(keys, values, none, self.info))
        self.counts = [self.policy.head_counts(state.context) for state in self.states]
        self.grown = growth(self.policy, self.prompts, self.new_tokens)
        self._reserve()
        self._allocate(store)
        self.clusters = [0] * len(self.states)
        for sequence, state in enumerate(self.states):
            self._load(sequence, state, state.order)
            self.states[sequence] = _hollow(state)
        self.settle()

    def room(self, lengths: Sequence[int], new_tokens: int) -> int:
        return super().room(lengths, new_tokens) + growth(self.policy, lengths, new_tokens) * SEGMENT

    def _reserve(self) -> None:
        """Buffers for the longest sequence and all growth to come."""
        store, info, policy = self.store, self.info, self.policy
        device, dtype, units = store.keys.device, store.keys.dtype, len(store.keys)
        every = [counts for heads in self.counts for counts in heads]
        clusters = max(1, *(c.n_centroids + self.grown * c.growth.centroids for c in every))
        nprobe = max(c.nprobe + self.grown * c.growth.nprobe for c in every)
        es = max(c.es + self.grown * c.growth.es for c in every)
        self.buffer_pages = max(self._room(c, nprobe) for c in every)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(units, *shape, dtype=torch.int32, device=device)

        self.centroids = torch.zeros(units, clusters, info.head_dim, dtype=dtype, device=device)
        self.value_sums = torch.zeros(units, clusters, info.value_dim, dtype=dtype, device=device)
        self.sizes, self.offsets = ints(clusters), ints(clusters + 1)
        self.spreads = torch.zeros(units, clusters, device=device) if policy.spread_correction else None
        self.visible, self.plan, self.resident = ints(), ints(PLAN), ints(4)
        self.logits = torch.zeros(units, info.group, clusters, device=device)
        self.stats = empty_stats(units, info.group, clusters, device)
        es = clusters if policy.estimate == "all" else es
        self.choice = Choice.empty(units, clusters, nprobe, es, device)
        tails = [n - state.tail_start for n, state in zip(store.lengths, self.states)]
        longest = policy.sink + max(SEGMENT + policy.local, max(tails) + 1)
        self.rows = Rows(self.resident, ints(8 * self.buffer_pages), self.choice.n_tokens, longest)
        # What usually comes decides how the work is split; any count up to the buffers is served.
        usual = nprobe * policy.tokens_per_centroid + policy.sink + policy.local + SEGMENT // 2
        bound = longest + 8 * self.buffer_pages
        self.attention = SparseAttention(
            units, info.group, info.value_dim, bound, es, device, usual_exact=min(usual, bound)
        )
        self.out = torch.empty(units, info.group, info.value_dim, dtype=dtype, device=device)

    def _room(self, counts: retroinfer.V1Counts, nprobe: int) -> int:
        """Pages of the execution buffer."""
        return max(counts.buffer_clusters, 4 * nprobe) * counts.pages_per_cluster

    def _allocate(self, store: LayerStore) -> None:
        """Decide where rows live: here, in the store, with room for clusters to come behind the rest."""
        self.spare = store.keys.shape[1] - self.grown * SEGMENT

    def _put_clusters(self, sequence: int, rows: Tensor, first: int, grown: int) -> int:
        """Lay rows [H, n] of the store out in that order, as the ``grown``-th segment; returns the first row.

        ``first`` is where the prompt's own (segment 0) begin.
        """
        first = self.spare + (grown - 1) * SEGMENT if grown else first
        units = self.store.units(sequence)
        for kept in (self.store.keys, self.store.values):
            wanted = rows[..., None].expand(-1, -1, kept.shape[2])
            kept[units, first : first + rows.shape[1]] = torch.gather(kept[units], 1, wanted)
        return first

    def _load(self, sequence: int, state: WaveIndexState, rows: Tensor, grown: int = 0) -> None:
        """Add the clusters of ``state``, whose members are in ``rows`` [H, n], to those of the sequence."""
        units, at = self.store.units(sequence), self.clusters[sequence]
        more = state.clusters.sizes.shape[1]
        where = slice(at, at + more)
        first = self._put_clusters(sequence, rows, state.sink, grown)
        self.centroids[units, where] = state.clusters.centroids
        self.value_sums[units, where] = state.clusters.value_sums
        self.sizes[units, where] = state.clusters.sizes.int()
        if self.spreads is not None and state.clusters.spreads is not None:
            self.spreads[units, where] = self.policy.spread_correction * state.clusters.spreads
        self.offsets[units, at] = first
        self.offsets[units, at + 1 : at + more + 1] = first + state.offsets[:, 1:].int()
        self.clusters[sequence] = at + more

    def settle(self) -> None:
        """Let full tails grow into clusters; then visible clusters, zone sizes and resident rows."""
        for sequence, state in enumerate(self.states):
            while self.store.lengths[sequence] - state.tail_start >= SEGMENT + self.policy.local:
                self._grow(sequence, state)
            self._plan(sequence, state)

    def _plan(self, sequence: int, state: WaveIndexState) -> None:
        clusters = self.clusters[sequence]
        units, device = self.store.units(sequence), self.plan.device
        grown = (state.tail_start - state.prompt_end) // SEGMENT
        self.visible[units] = clusters
        plan = []
        for counts in self.counts[sequence]:
            nprobe = counts.nprobe + grown * counts.growth.nprobe
            es = clusters if self.policy.estimate == "all" else counts.es + grown * counts.growth.es
            plan += [clusters, nprobe, es, self._room(counts, nprobe)]
        self.plan[units] = int_row(plan, device).view(-1, PLAN)
        first, tail = self._tail_rows(sequence)
        length = self.store.lengths[sequence]
        row = [first, state.sink, tail + state.tail_start, tail + length]
        self.resident[units] = int_row(row, device)

    def _tail_rows(self, sequence: int) -> tuple[int, int]:
        """The row of the first sink, and what to add to a later position to get its row."""
        return 0, 0

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        info, choice, attention = self.info, self.choice, self.attention
        grouped = queries.reshape(-1, info.group, info.head_dim)
        with attention.beside():
            self.store.append(keys, values, self.resident)
        centroid_logits(grouped, self.centroids, self.visible, self.logits, self.stats, info.scaling)
        choose(self.logits, self.stats, self.sizes, self.plan, choice)
        with attention.beside():
            attention.estimate(
                Estimate(
                    self.logits,
                    self.sizes,
                    self.value_sums,
                    choice.estimated,
                    choice.n_estimated,
                    self.spreads,
                ),
                grouped,
                info.scaling,
            )
        rows = self._retrieve()
        attention(
            grouped, self.store.keys, self.store.values, rows, self.out, info.scaling, choice.n_estimated
        )
        return self.out.view(len(queries), -1, info.value_dim)

    def _retrieve(self) -> Rows:
        """The rows of the blocks chosen."""
        cut(self.choice, self.sizes, self.plan, self.offsets, self.rows.listed)
        if self.log is not None:
            self.log.note(self.choice.retrieved, self.choice.truncated)
        return self.rows

    def advance(self) -> None:
        """Count the step; where 1,024 tokens have left the local window, they become one more segment."""
        super().advance()
        step = SEGMENT + self.policy.local
        if any(n - state.tail_start >= step for n, state in zip(self.store.lengths, self.states)):
            self.settle()

    def _grow(self, sequence: int, state: WaveIndexState) -> None:
        start = state.tail_start
        tail = self._tail_rows(sequence)[1]
        units, rows = self.store.units(sequence), slice(tail + start, tail + start + SEGMENT)
        more, new = replace(state), self.counts[sequence][0].growth
        more.add(self.store.keys[units, rows], self.store.values[units, rows], start, new.centroids, 1)
        self._load(sequence, more, more.order + tail, 1 + (start - state.prompt_end) // SEGMENT)
        state.tail_start = start + SEGMENT

    def mark(self) -> Any:
        return super().mark(), list(self.clusters), [state.tail_start for state in self.states]

    def rewind(self, mark: Any) -> None:
        lengths, self.clusters, tails = mark[0], list(mark[1]), mark[2]
        for state, tail_start in zip(self.states, tails):
            state.tail_start = tail_start
        super().rewind(lengths)

    def new_log(self, at: Tensor, steps: int) -> StepLog:
        """A log of this layer's shape."""
        return StepLog.empty(at, steps, self.choice.retrieved.shape, self.sizes)

    def gpu_bytes(self) -> dict[str, int]:
        index = nbytes(self.centroids, self.value_sums, self.sizes, self.offsets)
        index += 0 if self.spreads is None else nbytes(self.spreads)
        buffers = nbytes(self.logits, self.rows.listed, self.attention.sums, self.choice.estimated)
        return {"kv": nbytes(self.store.keys, self.store.values), "index": index, "buffers": buffers}


def _hollow(state: WaveIndexState) -> WaveIndexState:
    """The state without its clusters and tail, which the layer keeps."""
    clusters = state.clusters

    def none(rows: Tensor) -> Tensor:
        return rows[:, :0].clone()

    return replace(
        state,
        clusters=Clusters(none(clusters.centroids), none(clusters.sizes), none(clusters.value_sums)),
        order=none(state.order),
        offsets=torch.zeros_like(state.offsets[:, :1]),
        tail_keys=none(state.tail_keys),
        tail_values=none(state.tail_values),
    )


def growth(policy: WaveIndex, lengths: Sequence[int], new_tokens: int) -> int:
    """Segments that any of the prompts of ``lengths`` tokens makes in ``new_tokens`` more, at most."""

    def tail(length: int) -> int:
        return policy.local if policy.counts(length).n_centroids else max(length - policy.sink, 0)

    return max(max(0, tail(length) + new_tokens - policy.local) // SEGMENT for length in lengths)
