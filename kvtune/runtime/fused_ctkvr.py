"""CTkvr by kernels: nearest query centroids, the union of their lists, exact scores, then attention.

The same decisions as :class:`kvtune.policies.ctkvr.CTkvr`, whose ``build`` makes the centroids and the lists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtune.errors import InputError
from kvtune.geometry import LayerInfo
from kvtune.kernels.append import UNBOUNDED
from kvtune.kernels.attend import Rows, SparseAttention
from kvtune.kernels.choose import PLAN, Choice, choose, cut
from kvtune.kernels.query_lists import append_and_cut, cosines, empty_marks, inverse_norms, list_marked, probe
from kvtune.kernels.row_scores import empty_row_stats, row_logits
from kvtune.kernels.tiles import ROWS
from kvtune.policies.ctkvr import CTkvr
from kvtune.policies.ctkvr_lists import InvertedLists
from kvtune.runtime.fused_layer import FusedLayer, LayerStore, int_row, nbytes


def serves(policy: CTkvr, info: LayerInfo) -> bool:
    """Whether the fused path models this: the method, with any option that only changes what is built.

    Neither window, ALiBi nor sinks, and at most 16 heads a group.
    """
    options = policy.dynamic or policy.cold_start or policy.average_length
    plain = info.window is None and info.alibi is None and info.sinks is None
    return plain and info.group <= ROWS and not (options or policy.position_weights or policy.int8)


class FusedCTkvr(FusedLayer):
    """One layer of B sequences under CTkvr, keys and values kept on the device.

    The store's room bounds the tokens to come. Candidates stand in the order of positions, the last first, so
    that ties are the policy's.
    """

    def __init__(self, info: LayerInfo, policy: CTkvr) -> None:
        if not serves(policy, info):
            raise InputError(
                f"the fused engine does not serve ctkvr in layer {info.layer}", "use --engine torch"
            )
        self.info, self.policy = info, policy

    def build(self, store: LayerStore, prompt_queries: list[Tensor] | None = None) -> None:
        """As the base class; without prompt queries attention stays full, unless centroids come of a file."""
        self.store = store
        lists = []
        for sequence in range(len(store.lengths)):
            keys, values = store.of(sequence)
            queries = keys.new_zeros(len(keys), self.info.group, 0, self.info.head_dim)
            if prompt_queries is not None:
                queries = prompt_queries[sequence]
            index = self.policy.build(keys, values, queries, self.info)
            lists.append(index.stretches[0].lists)
        self._reserve(lists)
        for sequence, own in enumerate(lists):
            self._load(sequence, own)
        self.settle()

    def _reserve(self, lists: list[InvertedLists]) -> None:
        """Buffers for the most and longest lists."""
        store, info, policy = self.store, self.info, self.policy
        device, dtype, units = store.keys.device, store.keys.dtype, len(store.keys)
        counts = [own.tokens.shape[1] for own in lists]
        n_lists, longest = max(*counts, 1), max(*(own.tokens.shape[2] for own in lists), 1)
        n_probed, prompt = min(policy.nprobe, n_lists), max(store.lengths)
        n_candidates = max(1, min(n_probed * longest, prompt))
        kept = min(policy.top_k, n_candidates)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(units, *shape, dtype=torch.int32, device=device)

        self.centroids = torch.zeros(units, n_lists, info.group, info.head_dim, dtype=dtype, device=device)
        self.norms = torch.zeros(units, n_lists, info.group, device=device)
        self.tokens = ints(n_lists, longest) - 1
        self.n_lists, self.limits, self.stop = ints(), ints(2), ints()
        self.similarity = torch.zeros(units, n_lists, device=device)
        self.probed, self.marks = ints(n_probed) - 1, empty_marks(units, prompt, device)
        self.candidates, self.n_candidates = ints(n_candidates), ints()
        self.sizes = torch.ones_like(self.candidates)
        self.logits = torch.zeros(units, info.group, n_candidates, device=device)
        self.stats = empty_row_stats(units, info.group, n_candidates, device)
        self.plan, self.resident = ints(PLAN), ints(4)
        self.plan[:, 1] = self.plan[:, 3] = kept
        self.choice = Choice.empty(units, n_candidates, kept, 0, device)
        # Resident are the local tokens or, if more, those made while decoding; the rest of the prompt too
        # where it is no more than top_k, and all of it without lists.
        room = store.keys.shape[1]
        bound = policy.sink + policy.top_k + max(policy.local, room - min(store.lengths))
        bound = min(bound, room) if min(counts) else room
        usual = min(bound, policy.sink + policy.top_k + policy.local) if min(counts) else bound
        self.rows = Rows(self.resident, ints(kept), self.choice.n_tokens, bound)
        self.attention = SparseAttention(units, info.group, info.value_dim, bound, 0, device, usual)
        self.out = torch.empty(units, info.group, info.value_dim, dtype=dtype, device=device)

    def _load(self, sequence: int, lists: InvertedLists) -> None:
        """Copy the lists of a sequence, and say what of its prompt they serve."""
        units = self.store.units(sequence)
        count, length = lists.tokens.shape[1:]
        self.centroids[units, :count] = lists.centroids
        self.norms[units, :count] = inverse_norms(lists.centroids)
        self.tokens[units, :count, :length] = lists.tokens.int()
        self.n_lists[units] = count
        free = self.policy.top_k if count else UNBOUNDED
        self.limits[units] = int_row([self.store.lengths[sequence], min(free, UNBOUNDED)], self.limits.device)

    def settle(self) -> None:
        for sequence, length in enumerate(self.store.lengths):
            self.resident[self.store.units(sequence), 3] = length

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        info, store, policy = self.info, self.store, self.policy
        append_and_cut(
            keys.reshape(-1, info.head_dim), values.reshape(-1, info.value_dim), store.keys, store.values,
            self.resident, self.limits, self.stop, policy.sink, policy.local,
        )  # fmt: skip
        grouped = queries.reshape(-1, info.group, info.head_dim)
        cosines(grouped, self.centroids, self.norms, self.similarity, self.marks)
        probe(self.similarity, self.tokens, self.n_lists, self.stop, self.probed, self.marks)
        list_marked(self.marks, self.candidates, self.n_candidates, self.plan)
        row_logits(
            grouped, store.keys, self.candidates, self.n_candidates, self.logits, self.stats, info.scaling,
            info.softcap,
        )  # fmt: skip
        choose(self.logits, self.stats, self.sizes, self.plan, self.choice)
        cut(self.choice, self.sizes, self.plan, self.candidates, self.rows.listed, 1)
        self.attention(
            grouped, store.keys, store.values, self.rows, self.out, info.scaling, softcap=info.softcap
        )
        return self.out.view(len(queries), -1, info.value_dim)

    def gpu_bytes(self) -> dict[str, int]:
        index = nbytes(self.centroids, self.norms, self.tokens)
        buffers = nbytes(self.logits, self.candidates, self.sizes, self.marks, self.attention.sums)
        return {"kv": nbytes(self.store.keys, self.store.values), "index": index, "buffers": buffers}
