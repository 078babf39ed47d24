"""CTkvr by kernels makes the policy's steps: in Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from fused_case import Beside, layer_info

from kvtune.errors import InputError
from kvtune.policies.ctkvr import CTkvr
from kvtune.runtime.fused_ctkvr import FusedCTkvr, serves

SMALL = {"top_k": 6, "n_centroids": 10, "rho": 9, "nprobe": 3, "sink": 2, "local": 3}


def beside(lengths: list[int], room: int, windows: list[int] | None, layer=None, **options: object) -> Beside:
    policy = CTkvr(**{**SMALL, **options})
    return Beside(FusedCTkvr(layer_info(**(layer or {})), policy), policy, lengths, room, windows)


@pytest.mark.parametrize("layer", [{"kv_heads": 2}, {"softcap": 2.0}])
def test_steps_are_the_policys_while_the_local_window_leaves_the_prompt(layer):
    pair = beside([70, 41], 90, [10, 7], layer)
    for step in range(4):
        mine, theirs = pair.step()
        assert mine == theirs
        probed = pair.layer.probed
        assert (probed >= 0).all() and (probed[pair.info.n_kv_heads :] < 7).all()
        resident = 2 + max(3, step + 1)
        assert all(resident < len(rows) <= resident + 6 for rows in mine)


@pytest.mark.parametrize(
    "options",
    [
        {"centroids": "kmeans", "n_centroids": 4, "query_window": 12},
        {"centroids": "attention_weighted", "n_centroids": 4, "query_window": 12},
        {"simhash": 0.6},
        {"nprobe": 20, "rho": 3, "top_k": 2, "sink": 0},
    ],
)
def test_whatever_lists_were_built_are_served(options):
    pair = beside([50, 44], 60, [12, 12], **options)
    for _ in range(2):
        mine, theirs = pair.step()
        assert mine == theirs


def test_where_all_fits_nothing_is_scored_until_the_tail_has_moved_on():
    pair = beside([10, 30], 50, [6, 6])
    whole = []
    for step in range(4):
        mine, theirs = pair.step()
        assert mine == theirs
        whole.append(len(mine[0]) == 11 + step)
    assert whole == [True, False, False, False]


def test_prompts_within_the_sinks_and_the_local_window():
    pair = beside([1, 3], 20, [1, 3], sink=3)
    for step in range(4):
        mine, theirs = pair.step()
        assert mine == theirs == [set(range(2 + step)), set(range(4 + step))]


@pytest.mark.parametrize("windows", [None, [0, 8]])
def test_without_prompt_queries_attention_is_full(windows):
    pair = beside([40, 33], 50, windows)
    for step in range(2):
        mine, theirs = pair.step()
        assert mine == theirs
        assert mine[0] == set(range(41 + step))
        assert (len(mine[1]) == 34 + step) == (windows is None)


def test_ties_are_the_policys():
    pair = beside([60, 60], 70, [8, 8])
    for sequence in range(2):  # many tokens of one key
        for rows in (pair.kept[sequence][0], pair.layer.store.of(sequence)[0]):
            rows[:, 3:50] = rows[:, 3:4]
        index = pair.indexes[sequence]
        index.store.keys[:] = pair.kept[sequence][0]
        tokens = index.stretches[0].lists.tokens
        tokens[:] = (
            torch.arange(3, 12, device=tokens.device) + 3 * torch.arange(8, device=tokens.device)[:, None]
        )
        pair.layer._load(sequence, index.stretches[0].lists)
    for _ in range(2):
        mine, theirs = pair.step()
        assert mine == theirs


def test_dense_tokens_stay_resident_and_can_be_taken_back():
    pair = beside([40, 31], 60, [8, 8])
    pair.step()
    mark = pair.layer.mark()
    pair.extend(6)
    mine, theirs = pair.step()
    assert mine == theirs and {*range(40, 48)} <= mine[0]
    pair.layer.rewind(mark)
    pair.layer.attend(pair.new(2, 3, 12), pair.new(2, 1, 12), pair.new(2, 1, 10))
    assert pair.layer.resident.tolist() == [[0, 2, 39, 42], [0, 2, 30, 33]]


def test_what_is_held():
    layer = beside([40, 31], 60, [8, 8]).layer
    assert layer.gpu_bytes()["kv"] == 2 * 60 * (12 + 10) * 4
    assert layer.gpu_bytes()["index"] == 2 * 8 * (3 * 12 * 4 + 3 * 4 + 9 * 4)
    assert layer.host_bytes() == 0


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"dynamic": 10}, {}),
        ({"cold_start": 3}, {}),
        ({"average_length": 9}, {}),
        ({"position_weights": "1:2"}, {}),
        ({"int8": True}, {}),
        ({}, {"alibi": (0.5,) * 3}),
        ({}, {"sinks": (0.0,) * 3}),
        ({}, {"window": 8}),
        ({}, {"n_heads": 17}),
    ],
)
def test_what_is_not_served(options, changes):
    policy, info = CTkvr(**{**SMALL, **options}), layer_info(**changes)
    assert serves(CTkvr(**SMALL, simhash=0.9), layer_info()) and not serves(policy, info)
    with pytest.raises(InputError):
        FusedCTkvr(info, policy)
