"""What holds for every task: length, determinism, shape, scoring, bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import INSTRUCT, NO_TEMPLATE, byte_level, sentence_piece

from kvtune.errors import InputError
from kvtune.workloads import Sample, Turn, get_workload, workload_names, workload_titles

TASKS = workload_names()
TOKENIZERS = {
    "plain": byte_level(NO_TEMPLATE, adds_bos=True),
    "instruct": byte_level(INSTRUCT),
    "sentence_piece": sentence_piece(NO_TEMPLATE, adds_bos=True),
}


def make(tokenizer: Any, task: str, context: int = 1200, n: int = 1, **shape: int) -> list[Sample]:
    arguments = {"turns": 1, "requests": 1, "seed": 0, **shape}
    return list(get_workload(task).samples(tokenizer, context, n, **arguments))


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=5)
@given(context=st.integers(900, 2500), seed=st.integers(0, 1000))
def test_the_context_fills_its_budget_and_never_exceeds_it(
    kind: str, task: str, context: int, seed: int
) -> None:
    tokenizer = TOKENIZERS[kind]
    (sample,) = make(tokenizer, task, context, seed=seed)
    assert context - 32 <= len(sample.context_ids) <= context


@pytest.mark.parametrize("task", TASKS)
def test_samples_have_the_shape_asked_for(tokenizer: Any, task: str) -> None:
    samples = make(tokenizer, task, 4000, n=2, turns=3, requests=2)
    assert len(samples) == 2
    for sample in samples:
        assert sample.task == task
        assert [len(request.turns) for request in sample.requests] == [3, 3]
        for request in sample.requests:
            for turn in request.turns:
                assert turn.question in tokenizer.decode(turn.question_ids)
                assert tokenizer.decode(turn.reference_ids) == turn.reference
                assert turn.reference in tokenizer.decode(sample.context_ids)
            assert len({turn.question for turn in request.turns}) == 3


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_depends_on_the_seed_and_its_number_only(tokenizer: Any, task: str) -> None:
    three = make(tokenizer, task, n=3, seed=5)
    assert make(tokenizer, task, n=2, seed=5) == three[:2]
    assert three[0].context_ids != three[1].context_ids
    assert make(tokenizer, task, seed=6)[0].context_ids != three[0].context_ids


_PRINT_SAMPLES = """
import hashlib
from kvtune.workloads import get_workload, workload_names

class Words:
    chat_template = bos_token_id = None
    def __call__(self, text, **options):
        return {"input_ids": [int.from_bytes(hashlib.sha256(w.encode()).digest()[:4]) for w in text.split()]}

for name in workload_names():
    print(list(get_workload(name).samples(Words(), 600, 2, 1, 2, 7)))
"""


def test_samples_do_not_depend_on_hash_randomisation() -> None:
    printed = [
        subprocess.run(
            [sys.executable, "-c", _PRINT_SAMPLES],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert printed[0].count("Sample(") == 2 * len(TASKS)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("context", [1, 20, 60])
def test_a_context_too_short_for_the_task_is_refused(tokenizer: Any, task: str, context: int) -> None:
    with pytest.raises(InputError, match=f"{context} tokens") as caught:
        make(tokenizer, task, context)
    assert caught.value.hint is not None
    assert "--context" in caught.value.hint


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("option", "arguments"),
    [
        ("--context", {"context": 0}),
        ("--samples", {"n": 0}),
        ("--turns", {"turns": -1}),
        ("--requests", {"requests": 0}),
    ],
)
def test_counts_below_one_are_refused(
    tokenizer: Any, task: str, option: str, arguments: dict[str, int]
) -> None:
    with pytest.raises(InputError, match=f"{option} must be at least 1"):
        make(tokenizer, task, **arguments)


@pytest.mark.parametrize("task", TASKS)
def test_without_a_context_length_the_task_takes_its_own(tokenizer: Any, task: str) -> None:
    workload = get_workload(task)
    (sample,) = workload.samples(tokenizer, None, 1, 1, 1, 0)
    assert workload.default_context - 16 <= len(sample.context_ids) <= workload.default_context


def test_an_unknown_task_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InputError, match="unknown task 'niah_singel'") as caught:
        get_workload("niah_singel")
    assert caught.value.hint == "did you mean 'niah_single'?"


def test_the_registry_names_each_task_once() -> None:
    assert len(set(TASKS)) == len(TASKS)
    assert {"niah_single", "niah_multiquery", "code_search"} <= set(TASKS)
    assert list(workload_titles()) == TASKS
    for name in TASKS:
        assert get_workload(name).name == name


@pytest.mark.parametrize("task", ["niah_single", "niah_multiquery"])
def test_needle_answers_score_where_the_number_stands_in_the_text(task: str) -> None:
    turn = Turn("What is it?", (1,), "59300", (2,))
    score = get_workload(task).score
    assert score(turn, "The number is 59300.") == 1.0
    assert score(turn, "The number is 5930.") == 0.0
    assert score(Turn("What is it?", (1,)), "59300") is None


def test_code_answers_score_where_the_name_stands_as_a_word() -> None:
    turn = Turn("Which?", (1,), "parse_line", (2,))
    score = get_workload("code_search").score
    assert score(turn, "It is `parse_line()`.") == 1.0
    assert score(turn, "It is parse_lines.") == 0.0
    assert score(Turn("Which?", (1,)), "parse_line") is None
