from __future__ import annotations

import json
import math
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.caching.prefix import PrefixTrace, read_mooncake, replay_prefixes
from kvtune.errors import InputError

# Written out of order: by timestamp the requests are A (0 1 2), B (0 1 3), C (4 5), D (0 1 2 6), E (4 7).
EXCERPT = """\
{"timestamp": 0, "input_length": 1500, "output_length": 20, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 900, "output_length": 5, "hash_ids": [4, 5]}
{"timestamp": 3000, "input_length": 2048, "output_length": 7, "hash_ids": [0, 1, 2, 6]}
{"timestamp": 1000, "input_length": 1400, "output_length": 31, "hash_ids": [0, 1, 3]}

{"timestamp": 9000, "input_length": 700, "output_length": 9, "hash_ids": [4, 7]}
"""


@pytest.fixture
def excerpt(tmp_path: Path) -> PrefixTrace:
    path = tmp_path / "trace.jsonl"
    path.write_text(EXCERPT, encoding="utf-8")
    return read_mooncake(path)


def trace_of(requests: list[list[int]]) -> PrefixTrace:
    blocks = np.array([block for request in requests for block in request], np.int64)
    offsets = np.cumsum([0, *map(len, requests)])
    lengths = np.diff(offsets)
    return PrefixTrace(offsets, blocks, 512 * lengths, lengths, 512)


def slow_replay(requests: list[list[int]], capacity: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for block in request:
            if block not in cache:
                break
            hits += 1
        for block in request:
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


def test_reads_in_order_of_arrival(excerpt: PrefixTrace):
    assert excerpt.offsets.tolist() == [0, 3, 6, 8, 12, 14]
    assert excerpt.blocks.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 0, 1, 2, 6, 4, 7]
    assert excerpt.input_tokens.tolist() == [1500, 1400, 900, 2048, 700]
    assert excerpt.output_tokens.tolist() == [20, 31, 5, 7, 9]


def test_golden_hits_by_hand(excerpt: PrefixTrace):
    # B hits 0 1; D hits 0 1 2; E hits 4. With 3 blocks only B's hits fit. With 5, C pushes out block 2, and
    # before E the cache holds 5 0 1 2 6. With 6 blocks nothing is missing.
    sizes = [0, 3, 5, 6, 100, None]
    results = replay_prefixes(excerpt, sizes)
    assert [result.hit_blocks for result in results] == [0, 2, 4, 6, 6, 6]
    assert [result.capacity for result in results] == sizes
    assert results[-1].blocks == 14 and results[-1].hit_ratio == 6 / 14


def test_a_hit_ends_at_the_first_missing_block():
    # Two blocks fit. Request (0 1 2) leaves 1 2: block 0 is gone, so the others cannot be used.
    assert replay_prefixes(trace_of([[0, 1, 2], [0, 1, 2]]), [2])[0].hit_blocks == 0


@given(
    requests=st.lists(st.lists(st.integers(0, 14), unique=True, max_size=6), max_size=25),
    capacities=st.lists(st.integers(0, 18), min_size=1, max_size=5),
)
@settings(max_examples=150, deadline=None)
def test_equals_one_slow_replay_a_size(requests: list[list[int]], capacities: list[int]):
    found = [result.hit_blocks for result in replay_prefixes(trace_of(requests), capacities)]
    assert found == [slow_replay(requests, capacity) for capacity in capacities]


def test_nothing_asked_is_no_ratio():
    assert math.isnan(replay_prefixes(trace_of([[]]), [4])[0].hit_ratio)


GOOD = {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [0]}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        json.dumps({**GOOD, "hash_ids": 7}),
        json.dumps({**GOOD, "hash_ids": [-1]}),
        json.dumps({**GOOD, "hash_ids": [2**70]}),
        json.dumps({**GOOD, "input_length": -5}),
        json.dumps({**GOOD, "timestamp": "soon"}),
        json.dumps({key: value for key, value in GOOD.items() if key != "output_length"}),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 2"):
        read_mooncake(path)


def test_other_bad_files(tmp_path: Path):
    with pytest.raises(InputError, match="cannot read"):
        read_mooncake(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="no requests"):
        read_mooncake(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        read_mooncake(tmp_path / "binary.jsonl")
