"""Quest by kernels makes the policy's steps: in Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from fused_case import DEVICE, Beside, layer_info

from kvtune.errors import InputError
from kvtune.policies.quest import Quest
from kvtune.runtime.fused_quest import FusedQuest, serves


def beside(policy: Quest, lengths: list[int], room: int, **changes: object) -> Beside:
    return Beside(FusedQuest(layer_info(**changes), policy), policy, lengths, room)


@pytest.mark.parametrize("changes", [{"kv_heads": 2}, {"softcap": 2.0}])
def test_steps_are_the_policys_across_a_page_boundary(changes):
    pair = beside(Quest(token_budget=16, page_size=4), [62, 33], 70, **changes)
    heads = pair.info.n_kv_heads
    for step in range(4):
        mine, theirs = pair.step()
        assert mine == theirs
        own = [(62 + step) % 4 + 1, (33 + step) % 4 + 1]
        assert [len(rows) for rows in mine] == [12 + own[0]] * heads + [12 + own[1]] * heads


def test_short_prompts_are_attended_whole_until_they_grow():
    pair = beside(Quest(token_budget=1, page_size=2), [1, 5], 12)
    for step in range(6):
        mine, theirs = pair.step()
        assert mine == theirs
        # The budget is three pages: all tokens of the first three, later the own page and two others.
        assert [len(rows) for rows in mine] == [min(n, 6 - n % 2) for n in (2 + step, 6 + step)]


def test_a_budget_beyond_the_room_attends_everything():
    pair = beside(Quest(token_budget=10_000, page_size=8), [21, 5], 32)
    for step in range(2):
        mine, theirs = pair.step()
        assert mine == theirs == [set(range(22 + step)), set(range(6 + step))]


def test_bounds_follow_dense_tokens_and_forget_what_is_taken_back():
    pair = beside(Quest(token_budget=12, page_size=4), [30, 18], 64)
    pair.step()
    pair.extend(7)
    mark, kept = pair.layer.mark(), list(pair.kept)
    for _ in range(4):
        mine, theirs = pair.step()
        assert mine == theirs
    pair.layer.rewind(mark)
    pair.again(kept)
    for _ in range(2):
        mine, theirs = pair.step()
        assert mine == theirs


def test_a_prompt_shorter_than_a_page_can_be_gone_back_to():
    pair = beside(Quest(page_size=2), [1], 16)
    mark = pair.layer.mark()
    for _ in range(3):
        pair.step()
    pair.layer.rewind(mark)
    pair.again([(keys[:, :1], values[:, :1]) for keys, values in pair.kept])
    assert pair.step()[0] == [{0, 1}]


def test_the_log_names_the_pages_in_rank_order():
    pair = beside(Quest(token_budget=16, page_size=4), [33], 40)
    at = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    pair.layer.log = pair.layer.new_log(at, 4)
    for _ in range(2):
        pair.step()
        at += 1
    noted = pair.layer.log.accesses(0, 2, 40)
    assert noted.blocks.tolist() == [page for blocks in pair.blocks for page in blocks[0]]
    assert noted.offsets.tolist() == [0, 3, 6]
    assert noted.tokens.tolist() == [4] * 6 and noted.truncated.tolist() == [0, 0]


def test_what_is_held():
    layer = beside(Quest(page_size=4), [30, 18], 64).layer
    assert layer.gpu_bytes()["kv"] == 2 * 64 * (12 + 10) * 4
    assert layer.gpu_bytes()["index"] == 2 * 2 * 16 * 12 * 4
    assert layer.host_bytes() == 0


@pytest.mark.parametrize(
    "changes", [{"alibi": (0.5,) * 3}, {"sinks": (0.0,) * 3}, {"window": 8}, {"n_heads": 17}]
)
def test_what_is_not_served(changes):
    info = layer_info(**changes)
    assert serves(Quest(), layer_info()) and not serves(Quest(), info)
    with pytest.raises(InputError):
        FusedQuest(info, Quest())
