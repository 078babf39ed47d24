"""Prompt files: the three forms, their tokens, and a sentence for each way to get them wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import CHATML, NO_TEMPLATE, byte_level

from kvtune.errors import InputError
from kvtune.workloads import PromptFile, Sample
from kvtune.workloads.prompt_lines import parse_line

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}]
LONG = "The old miller repaired a broken lantern. " * 20


def write(folder: Path, *lines: object, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def read(path: Path, tokenizer: Any, context: int | None = None, n: int = 100) -> list[Sample]:
    return list(PromptFile(path).samples(tokenizer, context, n, 1, 1, 0))


def test_a_text_file_is_one_raw_prompt(tmp_path: Path) -> None:
    tokenizer = byte_level(CHATML, adds_bos=True)
    text = "\nWhole text,\n  spaces and all.\n"
    (sample,) = read(write(tmp_path, text, name="prompt.txt"), tokenizer)
    assert list(sample.context_ids) == tokenizer(text)["input_ids"]
    assert tokenizer.decode(sample.context_ids) == f"<s>{text}"
    (turn,) = sample.requests[0].turns
    assert turn.question_ids == () == turn.reference_ids
    assert turn.reference is None


def test_prompts_are_raw_and_may_have_a_reference(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "One and one is"}, "", {"prompt": "Two is", "reference": " two"})
    one, two = read(path, tokenizer)
    assert tokenizer.decode(one.context_ids) == "One and one is"
    assert one.requests[0].turns[0].reference is None
    turn = two.requests[0].turns[0]
    assert (turn.question_ids, turn.reference) == ((), " two")
    assert tokenizer.decode(turn.reference_ids) == " two"
    assert len(PromptFile(path)) == 2


def test_a_chat_is_the_context_and_its_closing_the_question(tokenizer: Any, tmp_path: Path) -> None:
    (sample,) = read(write(tmp_path, {"messages": CHAT, "reference": "A lantern."}), tokenizer)
    (turn,) = sample.requests[0].turns
    assert (
        list(sample.context_ids + turn.question_ids)
        == tokenizer(
            tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True),
            add_special_tokens=False,
        )["input_ids"]
    )
    assert tokenizer.decode(turn.question_ids) == "<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(turn.reference_ids) == turn.reference == "A lantern."
    assert turn.question == "What is it?"


def test_a_chat_without_a_template_is_joined_by_newlines(tmp_path: Path) -> None:
    tokenizer = byte_level(NO_TEMPLATE, adds_bos=True)
    (sample,) = read(write(tmp_path, {"messages": CHAT}), tokenizer)
    (turn,) = sample.requests[0].turns
    assert tokenizer.decode(sample.context_ids + turn.question_ids) == "<s>Be brief.\nWhat is it?\n"


def test_a_context_has_requests_and_turns_of_its_own(tokenizer: Any, tmp_path: Path) -> None:
    turns = [{"question": "What?", "reference": "A lantern."}, {"question": "Why?", "reference": None}]
    line = {"context": LONG, "requests": [{"turns": turns}, {"turns": [{"question": "Who?"}]}]}
    (sample,) = read(write(tmp_path, line), tokenizer)
    first, second = sample.requests
    assert [turn.question for turn in first.turns] == ["What?", "Why?"]
    assert [turn.reference for turn in first.turns] == ["A lantern.", None]
    assert tokenizer.decode(first.turns[1].question_ids).startswith("<|im_end|>\n<|im_start|>user\nWhy?")
    assert [turn.question for turn in second.turns] == ["Who?"]
    assert tokenizer.decode(sample.context_ids).endswith(f"user\n{LONG}")
    assert PromptFile(tmp_path / "prompts.jsonl").score(first.turns[0], "It is a lantern.") == 1.0


@pytest.mark.parametrize(
    "line", [{"prompt": LONG}, {"context": LONG, "requests": [{"turns": [{"question": "Q"}]}]}]
)
def test_a_context_length_cuts_long_texts_and_leaves_short_ones(
    tokenizer: Any, tmp_path: Path, line: dict[str, Any]
) -> None:
    path = write(tmp_path, line)
    (whole,) = read(path, tokenizer)
    (cut,) = read(path, tokenizer, context=50)
    assert cut.context_ids == whole.context_ids[:50]
    assert cut.requests == whole.requests
    assert read(path, tokenizer, context=100_000) == [whole]


def test_a_chat_longer_than_the_context_length_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "short"}, {"messages": [{"role": "user", "content": LONG}]})
    with pytest.raises(InputError, match=r"line 2: the chat has \d+ tokens, more than --context 50"):
        read(path, tokenizer, context=50)


def test_no_more_samples_come_than_are_asked_for(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, *({"prompt": f"Number {i}"} for i in range(5)))
    assert read(path, tokenizer, n=2) == read(path, tokenizer)[:2]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        ("\ufeff".encode(), "is empty"),
        (b'{"prompt": "a\xff"}', r"not UTF-8 \(byte 13\)"),
        (b'{"prompt": "a"}\n{"prompt": ', "line 2 is not valid JSON"),
        (b"[" * 100_000, "line 1 is not valid JSON"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=reason) as caught:
        PromptFile(path)
    assert str(path) in caught.value.message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        PromptFile(tmp_path / "none.txt")
    with pytest.raises(InputError, match=r"must end in \.txt or \.jsonl"):
        PromptFile(write(tmp_path, "x", name="prompts.csv"))
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        PromptFile(tmp_path / "folder.txt")


def test_a_byte_order_mark_is_no_part_of_the_prompt(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("\ufeffHello".encode())
    assert tokenizer.decode(read(path, tokenizer)[0].context_ids) == "Hello"


def _requests(turn: object) -> dict[str, object]:
    return {"context": "c", "requests": [{"turns": [turn]}]}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[]", "must be a JSON object"),
        ("{}", "it has none"),
        ('{"prompt": "a", "messages": []}', "it has 'prompt' and 'messages'"),
        ('{"prompt": ""}', "'prompt' must be a text that is not empty"),
        ('{"prompt": 5}', "'prompt' must be a text that is not empty"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ('{"prompt": "a", "refrence": "b"}', "unknown key 'refrence'"),
        ('{"prompt": "a", "reference": 5}', "'reference' must be a text"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": "hello"}', "at least one message"),
        ('{"messages": ["hello"]}', "message 1 must be a JSON object"),
        (json.dumps({"messages": [{"role": "robot", "content": "a"}]}), "message 1: 'role' must be one of"),
        (json.dumps({"messages": [{"role": ["user"], "content": "a"}]}), "message 1: 'role' must be one of"),
        (json.dumps({"messages": [{"role": "user"}]}), "message 1: 'content' must be a text"),
        (json.dumps({"messages": [*CHAT, {"role": "assistant", "content": "a"}]}), "must be the user's"),
        (json.dumps({"messages": [{"role": "user", "content": "a", "name": "b"}]}), "unknown key 'name'"),
        ('{"context": "a"}', "'requests' must be a list with at least one entry"),
        ('{"context": "a", "requests": []}', "'requests' must be a list with at least one entry"),
        ('{"context": "a", "requests": [5]}', "request 1 must be a JSON object"),
        ('{"context": "a", "requests": [{"turns": []}]}', "request 1: 'turns' must be a list"),
        (json.dumps(_requests("q")), "request 1, turn 1 must be a JSON object"),
        (json.dumps(_requests({})), "request 1, turn 1: 'question' must be a text"),
        (json.dumps(_requests({"question": "q", "answer": "a"})), "unknown key 'answer'"),
        (json.dumps({**_requests({"question": "q"}), "reference": "a"}), "unknown key 'reference'"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path, {"prompt": "fine"}, "", line)
    with pytest.raises(InputError, match=reason) as caught:
        PromptFile(path)
    assert caught.value.message.startswith(f"{path}: line 3")


def test_an_unknown_key_comes_with_a_suggestion() -> None:
    with pytest.raises(InputError) as caught:
        parse_line('{"prompt": "a", "refrence": "b"}', "line 1")
    assert caught.value.hint == "did you mean 'reference'?"


_keys = st.sampled_from(["prompt", "messages", "context", "requests", "turns", "question", "role", "content"])
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(_keys | st.text(max_size=3), inner, max_size=3)
    ),
)


@given(_json)
def test_any_json_is_a_prompt_or_an_input_error(entry: object) -> None:
    try:
        prompt = parse_line(json.dumps(entry), "line 1")
    except InputError as error:
        assert error.message.startswith("line 1")
    else:
        assert isinstance(entry, dict)
        assert type(prompt).__name__ in ("RawPrompt", "ChatPrompt", "ContextPrompt")
