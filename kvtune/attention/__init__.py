"""Exact attention and the three-zone merge that every claimed output error rests on."""

from kvtune.attention.reference import exact_attention, reference_attention
from kvtune.attention.scores import attention_scores, eligible, group_queries, shape_scores
from kvtune.attention.zones import Zone, estimation_zone, exact_zone, merge_zones, sparse_attention

__all__ = [
    "Zone",
    "attention_scores",
    "eligible",
    "estimation_zone",
    "exact_attention",
    "exact_zone",
    "group_queries",
    "merge_zones",
    "reference_attention",
    "shape_scores",
    "sparse_attention",
]
