"""The names, units and meanings of everything an analysis measures, in one table."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """``heads`` says what one value belongs to: a ``query`` head, a ``kv`` head or the whole ``layer``."""

    unit: str
    heads: str
    meaning: str


METRICS: dict[str, Metric] = {
    "query_cosine": Metric(
        "cosine", "query", "cosine of the post-RoPE queries of two decode steps, lag apart"
    ),
    "overlap": Metric(
        "share", "query", "share of the true top-100 tokens that two decode steps have in common"
    ),
    "overlap_chance": Metric("share", "layer", "overlap that two random sets of that size would have"),
    "working_set": Metric(
        "tokens", "query", "distinct tokens in the true top-100 of that many steps together"
    ),
    "layer_overlap": Metric(
        "share", "layer", "share of the layer's top-100 tokens found in the layer below's"
    ),
    "layer_overlap_chance": Metric("share", "layer", "layer_overlap of two random sets of that size"),
    "entropy": Metric("nats", "query", "entropy of the attention distribution over tokens"),
    "tokens_90": Metric("tokens", "query", "fewest tokens that hold 90% of the attention mass"),
    "tokens_95": Metric("tokens", "query", "fewest tokens that hold 95% of the attention mass"),
    "tokens_99": Metric("tokens", "query", "fewest tokens that hold 99% of the attention mass"),
    "token_share_95": Metric("share", "query", "tokens_95 as a share of the tokens the query may see"),
    "sink_mass": Metric("share", "query", "attention mass on the first 4 tokens"),
    "local_mass": Metric("share", "query", "attention mass on the last 64 tokens"),
    "late_mass": Metric("share", "query", "attention mass on tokens after the prompt"),
    "visible_tokens": Metric("tokens", "layer", "tokens that a query may see"),
    "full_read_bytes": Metric("bytes", "layer", "bytes full attention reads per step in one kv head"),
    "recall_index": Metric("share", "query", "recall@100 outside the policy's steady zone"),
    "recall_attention": Metric("share", "query", "recall@100 among all tokens"),
    "mass": Metric("share", "query", "attention mass on the tokens the policy attends exactly"),
    "error": Metric("relative", "query", "|o - o_full| / |o_full| of the attention output"),
    "error_without_estimation": Metric("relative", "query", "the error if the estimation zone were dropped"),
    "read_bytes": Metric("bytes", "kv", "bytes the policy reads from device memory per step"),
    "scan_bytes": Metric("bytes", "kv", "part of read_bytes spent on deciding what to attend"),
    "effective_tokens": Metric("tokens", "kv", "tokens attended exactly, after page rounding"),
}


@dataclass(frozen=True)
class Observations:
    """One metric on one layer of one timeline.

    values [n, heads] (one column for a metric of the layer), turns [n]. ``lag`` is the lag in steps, or the
    number of steps of a working set; ``None`` where there is none. NaN: not measurable.
    """

    metric: str
    values: Tensor
    turns: Tensor
    lag: int | None = None

    def cpu(self) -> Observations:
        """The same values on the CPU."""
        return replace(self, values=self.values.cpu(), turns=self.turns.cpu())

    @property
    def heads(self) -> str:
        return METRICS[self.metric].heads
