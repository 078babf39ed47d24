"""RetroInfer's counts against the golden table and against its rules, written out step by step."""

from __future__ import annotations

from fractions import Fraction
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.errors import InputError
from kvtune.policies.retroinfer import Growth, growth_counts, nearest_multiple, v0_counts, v1_counts

GOLDEN = [
    # context, segments, n_centroids, nprobe, es, cache clusters at ratio 0 / 0.05, buffer pages
    (4096, 1, 256, 5, 59, 15, 13, 300),
    (8192, 1, 512, 9, 119, 27, 26, 72),
    (30000, 4, 1872, 34, 434, 102, 94, 272),
    (120000, 15, 7440, 134, 1726, 402, 372, 1072),
    (131072, 16, 8192, 147, 1901, 441, 410, 1176),
    (1024000, 125, 64000, 1152, 14848, 3456, 3200, 9216),
]


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: str(row[0]))
def test_v1_golden_table(row):
    context, segments, centroids, nprobe, es, cache_default, cache_5, buffer_pages = row
    counts = v1_counts(context)
    assert (counts.n_segment, counts.n_centroids, counts.nprobe, counts.es) == (
        segments,
        centroids,
        nprobe,
        es,
    )
    assert counts.max_compute == nprobe + es
    assert counts.cache_clusters == cache_default
    assert counts.cache_pages == 2 * cache_default
    assert counts.buffer_pages == buffer_pages
    assert v1_counts(context, cache_ratio=0.05).cache_clusters == cache_5
    assert counts.segments_new == 0


def test_growth_segment_of_the_defaults():
    assert growth_counts() == Growth(centroids=64, nprobe=1, es=15)


@pytest.mark.parametrize(("new_tokens", "segments"), [(0, 0), (1024, 0), (1025, 1), (2048, 1), (2049, 2)])
def test_v1_growth_is_counted_in_cache_and_buffer(new_tokens, segments):
    counts = v1_counts(131072, cache_ratio=0.05, new_tokens=new_tokens)
    assert counts.segments_new == segments
    assert (counts.n_centroids, counts.nprobe) == (8192, 147)
    assert counts.cache_clusters == round((8192 + 64 * segments) * 0.05)
    assert counts.buffer_pages == 2 * 4 * (147 + segments)
    assert v1_counts(131072, new_tokens=new_tokens).cache_clusters == 3 * (147 + segments)


def test_v1_short_prompt_has_no_clusters_until_it_grows():
    short = v1_counts(1091)
    assert (short.n_centroids, short.nprobe, short.es, short.cache_clusters) == (0, 0, 0, 0)
    assert v1_counts(1092).n_centroids > 0
    # 1,000 prompt tokens outside the steady zone and 1,100 made ones: 2,100 → 2 segments
    grown = v1_counts(1068, new_tokens=1100)
    assert (grown.n_centroids, grown.segments_new, grown.cache_clusters) == (0, 2, 6)


def test_v1_short_context_buffer_overrides_the_file():
    assert v1_counts(4096, buffer_cluster_num=200).buffer_clusters == 150
    assert v1_counts(4097, buffer_cluster_num=200).buffer_clusters == 200


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        # ceil(120000/16) = 7500, 14 segments: multiples of 448 → 7616; 7616·0.018 = 137.09; 7616/4 = 1904
        (120000, (14, 7616, 137, 411, 2041)),
        (131072, (16, 8192, 147, 441, 2195)),
        (4096, (1, 256, 4, 12, 68)),
        # ceil(30000/16) = 1875, 3 segments: 19·96 = 1824 or 20·96 = 1920: 45 up, 51 down → 1920
        (30000, (3, 1920, 34, 102, 514)),
    ],
)
def test_v0_by_hand(context, expected):
    counts = v0_counts(context)
    assert (
        counts.n_segment,
        counts.n_centroids,
        counts.nprobe,
        counts.cache_cluster_num,
        counts.max_compute_cluster_num,
    ) == expected


def test_v0_never_yields_zero_clusters():
    assert v0_counts(100).n_centroids == 32


@given(st.integers(0, 10**7), st.integers(1, 10**4))
def test_nearest_multiple_is_nearest_and_ties_go_low(value, factor):
    candidates = [value // factor * factor + shift * factor for shift in (0, 1)]
    best = min(candidates, key=lambda multiple: (abs(Fraction(value - multiple)), multiple))
    assert nearest_multiple(value, factor) == best


@given(
    context=st.integers(1, 2_000_000),
    retrieval=st.floats(0, 1),
    estimation=st.floats(0, 1),
    cache_ratio=st.floats(0, 1),
    tokens_per_centroid=st.integers(1, 64),
)
def test_v1_invariants(context, retrieval, estimation, cache_ratio, tokens_per_centroid):
    counts = v1_counts(context, retrieval, estimation, cache_ratio, tokens_per_centroid=tokens_per_centroid)
    assert counts.n_centroids % lcm(8, counts.n_segment) == 0
    assert 0 <= counts.nprobe <= counts.n_centroids
    assert counts.es >= 0
    assert counts.max_compute <= counts.n_centroids
    assert counts.buffer_clusters >= 4 * counts.nprobe
    assert counts.cache_pages == counts.cache_clusters * counts.pages_per_cluster


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"context": 0}, "context must"),
        ({"context": 10, "retrieval": 1.5}, "retrieval must"),
        ({"context": 10, "estimation": -0.1}, "estimation must"),
        ({"context": 10, "cache_ratio": float("nan")}, "cache_ratio must"),
        ({"context": 10, "tokens_per_centroid": 0}, "tokens_per_centroid must"),
    ],
)
def test_bad_numbers_are_refused(arguments, word):
    with pytest.raises(InputError, match=word):
        v1_counts(**arguments)
