"""Quest by kernels: bound every page, choose the best, attend them and the page being written.

The same decisions as :class:`kvtune.policies.quest.Quest`. A page's rows are consecutive, so nothing is
moved; the bounds grow in place, inside the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtune.errors import InputError
from kvtune.geometry import PAGE_TOKENS, LayerInfo
from kvtune.kernels.attend import Rows, SparseAttention
from kvtune.kernels.choose import BEST, PLAN, Choice, choose, cut
from kvtune.kernels.quest_pages import append_to_page
from kvtune.kernels.scan import empty_stats, page_bounds
from kvtune.kernels.tiles import ROWS
from kvtune.policies.quest import Quest
from kvtune.runtime.fused_layer import FusedLayer, LayerStore, nbytes
from kvtune.runtime.step_log import StepLog


def serves(policy: Quest, info: LayerInfo) -> bool:
    """Whether the fused path models this layer: neither window, ALiBi nor sinks, at most 16 heads a group."""
    plain = info.window is None and info.alibi is None and info.sinks is None
    return plain and info.group <= ROWS


class FusedQuest(FusedLayer):
    """One layer of B sequences under Quest, keys and values kept on the device.

    The store's room bounds the tokens to come.
    """

    def __init__(self, info: LayerInfo, policy: Quest) -> None:
        if not serves(policy, info):
            raise InputError(
                f"the fused engine does not serve quest in layer {info.layer}", "use --engine torch"
            )
        self.info, self.policy = info, policy

    def build(self, store: LayerStore, prompt_queries: list[Tensor] | None = None) -> None:
        self.store = store
        self._reserve()
        self.bounded = [0] * len(store.lengths)
        self.settle()

    def _reserve(self) -> None:
        """Buffers for as many pages as the store has room for."""
        store, info, size = self.store, self.info, self.policy.page_size
        device, dtype = store.keys.device, store.keys.dtype
        units, room = store.keys.shape[:2]
        pages = -(-room // size)
        count = min(max(self.policy.token_budget // size, 3) - 1, pages)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(units, *shape, dtype=torch.int32, device=device)

        self.low = torch.zeros(units, pages, info.head_dim, dtype=dtype, device=device)
        self.high = torch.zeros_like(self.low)
        self.sizes = ints(pages) + size
        self.offsets = ints(pages) + size * torch.arange(pages, dtype=torch.int32, device=device)
        self.visible, self.plan, self.resident = ints(), ints(PLAN), ints(4)
        self.plan[:, 1] = count
        self.plan[:, 3] = count * -(-size // PAGE_TOKENS)
        self.logits = torch.zeros(units, info.group, pages, device=device)
        self.stats = empty_stats(units, info.group, pages, device)
        self.choice = Choice.empty(units, pages, count, 0, device)
        self.rows = Rows(self.resident, ints(count * size), self.choice.n_tokens, size)
        self.attention = SparseAttention(units, info.group, info.value_dim, (count + 1) * size, 0, device)
        self.out = torch.empty(units, info.group, info.value_dim, dtype=dtype, device=device)

    def settle(self) -> None:
        """Bound the pages whose tokens the host put there or took away, and say where the next one goes."""
        size = self.policy.page_size
        for sequence, length in enumerate(self.store.lengths):
            first = min(self.bounded[sequence], length) // size
            keys, _ = self.store.of(sequence, first * size)
            units, whole = self.store.units(sequence), keys.shape[1] // size
            for page, rows in (
                (first, keys[:, : whole * size].unflatten(1, (whole, size))),
                (first + whole, keys[:, None, whole * size :]),
            ):
                if rows.numel():
                    where = slice(page, page + rows.shape[1])
                    self.low[units, where], self.high[units, where] = rows.amin(2), rows.amax(2)
            self.resident[units, 3] = length
            self.bounded[sequence] = length

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        info, store, choice = self.info, self.store, self.choice
        append_to_page(
            keys.reshape(-1, info.head_dim), values.reshape(-1, info.value_dim), store.keys, store.values,
            self.low, self.high, self.resident, self.visible, self.plan, self.policy.page_size,
        )  # fmt: skip
        grouped = queries.reshape(-1, info.group, info.head_dim)
        page_bounds(
            grouped, self.low, self.high, self.visible, self.logits, self.stats, info.scaling, info.softcap
        )
        choose(self.logits, self.stats, self.sizes, self.plan, choice, BEST)
        cut(choice, self.sizes, self.plan, self.offsets, self.rows.listed, self.policy.page_size)
        if self.log is not None:
            self.log.note(choice.retrieved, choice.truncated)
        self.attention(
            grouped, store.keys, store.values, self.rows, self.out, info.scaling, softcap=info.softcap
        )
        return self.out.view(len(queries), -1, info.value_dim)

    def advance(self) -> None:
        super().advance()
        self.bounded = list(self.store.lengths)  # the step itself bounded its token's page

    def new_log(self, at: Tensor, steps: int) -> StepLog:
        """A log of this layer's shape; its blocks are pages of ``page_size`` tokens."""
        return StepLog.empty(at, steps, self.choice.retrieved.shape, self.sizes)

    def gpu_bytes(self) -> dict[str, int]:
        index = nbytes(self.low, self.high)
        buffers = nbytes(self.logits, self.sizes, self.offsets, self.rows.listed, self.attention.sums)
        return {"kv": nbytes(self.store.keys, self.store.values), "index": index, "buffers": buffers}
