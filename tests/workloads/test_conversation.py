"""The pieces of a conversation against its template rendered as a whole."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import CHATML, DATED, INSTRUCT, NO_TEMPLATE, THINKING, byte_level, sentence_piece

from kvtune.errors import InputError
from kvtune.workloads.conversation import Conversation, begin_ids, encode_after, raw_ids, split_messages

BYTE_LEVEL = {
    name: byte_level(template, adds_bos=True)
    for name, template in {
        "chatml": CHATML,
        "instruct": INSTRUCT,
        "dated": DATED,
        "thinking": THINKING,
        "plain": NO_TEMPLATE,
    }.items()
}
PREFIX_STABLE = ["chatml", "instruct", "dated", "plain"]
CLOSING = {CHATML: "<|im_end|>\n", INSTRUCT: " </s>", DATED: "<|im_end|>"}
TODAY = datetime.now().strftime("%d %b %Y")
EXCHANGES = [("What is the number?", "59300"), ("And the other?", "80320"), ("Why?", "who knows")]

Exchanges = list[tuple[str, str]]


def whole_text(tokenizer: Any, context: str, exchanges: Exchanges) -> str:
    """The conversation as the template itself writes it, up to the last answer's text."""
    if tokenizer.chat_template is None:
        return context + "".join(f"\n\n{question}\n{answer}" for question, answer in exchanges)
    closing = CLOSING[tokenizer.chat_template]
    messages = []
    for question, answer in exchanges:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages[0] = {"role": "user", "content": f"{context}\n\n{exchanges[0][0]}"}
    text = tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=False).replace(
        TODAY, "01 Jan 2025"
    )
    assert text.endswith(exchanges[-1][1] + closing)
    return text.removesuffix(closing)


def whole_ids(tokenizer: Any, text: str) -> list[int]:
    plain = tokenizer.chat_template is None  # a template writes its own BOS
    return tokenizer(text, add_special_tokens=plain)["input_ids"]


def pieces(tokenizer: Any, context: str, exchanges: Exchanges) -> list[tuple[int, ...]]:
    conversation = Conversation(tokenizer, len(exchanges))
    turns = conversation.turns(context, exchanges)
    return [
        conversation.context_ids(context),
        *(ids for turn in turns for ids in (turn.question_ids, turn.reference_ids)),
    ]


words = st.text(alphabet="abcdefgh XYZ019.,;ä語", min_size=1).map(lambda text: f"a{text.strip()}z")


@pytest.mark.parametrize("name", PREFIX_STABLE)
@given(context=words, exchanges=st.lists(st.tuples(words, words), min_size=1, max_size=3))
def test_pieces_equal_the_whole_conversation(name: str, context: str, exchanges: Exchanges) -> None:
    tokenizer = BYTE_LEVEL[name]
    text = whole_text(tokenizer, context, exchanges)
    together = [token for piece in pieces(tokenizer, context, exchanges) for token in piece]
    assert together == whole_ids(tokenizer, text)


@pytest.mark.parametrize("name", ["chatml", "plain"])
@given(context=st.text(), question=st.text(), answer=st.text(min_size=1))
def test_pieces_spell_the_text_whatever_the_seams(
    name: str, context: str, question: str, answer: str
) -> None:
    tokenizer = BYTE_LEVEL[name]
    exchanges = [(question, answer), ("Why?", answer)]
    together = [token for piece in pieces(tokenizer, context, exchanges) for token in piece]
    text = tokenizer.decode(together, clean_up_tokenization_spaces=False)
    bos = "<s>" if name == "plain" else ""
    assert text == bos + whole_text(tokenizer, context, exchanges)


def test_a_merge_across_a_seam_is_kept_apart() -> None:
    tokenizer = BYTE_LEVEL["chatml"]
    # Before a word "\n\n\n" splits as "\n\n" + "\n"; cut behind the first newline it is "\n" + "\n" + "\n".
    context, exchanges = "The old miller.\n", [("What?", "12")]
    context_ids, question_ids, _ = pieces(tokenizer, context, exchanges)
    whole = whole_ids(tokenizer, whole_text(tokenizer, context, exchanges))
    newline, two = (tokenizer.convert_tokens_to_ids(token) for token in ("Ċ", "ĊĊ"))
    assert context_ids[-1] == newline
    assert question_ids[:2] == (newline, newline)
    seam = len(context_ids) - 1
    assert whole[seam : seam + 2] == [two, newline]
    assert whole[:seam] == list(context_ids[:-1])
    assert whole[seam + 2 :][: len(question_ids) - 2] == list(question_ids[2:])


@pytest.mark.parametrize("name", list(BYTE_LEVEL))
def test_bos_stands_at_the_start_once(name: str) -> None:
    tokenizer = BYTE_LEVEL[name]
    context_ids, *_ = pieces(tokenizer, "The old miller.", EXCHANGES)
    expected = 0 if name in ("chatml", "thinking") else 1
    assert context_ids.count(tokenizer.bos_token_id) == expected
    assert (context_ids[0] == tokenizer.bos_token_id) == bool(expected)


def test_plain_text_has_no_bos_where_the_tokenizer_adds_none() -> None:
    tokenizer = byte_level(NO_TEMPLATE, adds_bos=False)
    assert tokenizer.bos_token_id not in Conversation(tokenizer, 1).context_ids("The old miller.")


def test_a_bos_written_in_a_raw_text_is_not_doubled() -> None:
    tokenizer = BYTE_LEVEL["plain"]
    assert raw_ids(tokenizer, "<s>The old miller.") == raw_ids(tokenizer, "The old miller.")


def test_no_space_is_invented_in_the_middle_of_a_line() -> None:
    tokenizer = sentence_piece(NO_TEMPLATE, adds_bos=True)
    exchanges = [("12?", "34"), ("56?", "78")]
    together = [token for piece in pieces(tokenizer, "90", exchanges) for token in piece]
    assert together == whole_ids(tokenizer, whole_text(tokenizer, "90", exchanges))
    alone = tuple(tokenizer("34", add_special_tokens=False)["input_ids"])
    assert encode_after(tokenizer, "12?\n", "34") == alone[1:]  # without the leading space


def test_answers_carry_the_space_the_template_puts_before_them() -> None:
    tokenizer = BYTE_LEVEL["instruct"]
    first, second, _ = Conversation(tokenizer, 3).turns("The old miller.", EXCHANGES)
    assert tokenizer.decode(first.reference_ids) == " 59300"
    assert tokenizer.decode(second.question_ids) == " </s><s>[INST] And the other? [/INST]"


def test_where_history_differs_from_the_prompt_the_tokens_fed_are_the_prompts() -> None:
    tokenizer = BYTE_LEVEL["thinking"]
    first, second, _ = Conversation(tokenizer, 3).turns("The old miller.", EXCHANGES)
    assert tokenizer.decode(first.question_ids).endswith("assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.decode(first.reference_ids) == "59300"
    assert tokenizer.decode(second.question_ids).startswith("<|im_end|>\n<|im_start|>user\nAnd the other?")


def test_a_template_with_the_date_gives_the_same_tokens_every_day() -> None:
    tokenizer = BYTE_LEVEL["dated"]
    context_ids, *_ = pieces(tokenizer, "Context", EXCHANGES)
    assert tokenizer.decode(context_ids).startswith("<s>Today Date: 01 Jan 2025\n")


def test_turns_without_a_reference_have_no_reference_tokens() -> None:
    first, second = Conversation(BYTE_LEVEL["chatml"], 2).turns("Context", [("What?", None), ("Why?", None)])
    assert first.reference_ids == () == second.reference_ids
    assert first.reference is None
    assert second.question_ids


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no users here') }}", "no users here"),
        ("{{ messages[0].content.nothing.more }}", "fails on a plain conversation"),
        ("{{ messages[-1]['content'] }}", "does not show every message once"),
        ("{{ messages[0]['content'] }}{{ messages[0]['content'] }}", "does not show every message once"),
    ],
)
def test_a_template_that_cannot_be_cut_is_refused(template: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Conversation(byte_level(template), 2)


@pytest.mark.parametrize("name", ["chatml", "instruct", "dated", "thinking"])
@pytest.mark.parametrize("ending", ["", " \n"])
def test_a_given_chat_is_cut_behind_its_last_message(name: str, ending: str) -> None:
    tokenizer = BYTE_LEVEL[name]
    messages = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": f"What is it?{ending}"},
    ]
    text, closing = split_messages(tokenizer, messages)
    assert text + closing == tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    ).replace(TODAY, "01 Jan 2025")
    assert text.rstrip().endswith("What is it?")
    assert "Hello" not in closing


def test_a_given_chat_without_a_template_is_joined_by_newlines() -> None:
    tokenizer = BYTE_LEVEL["plain"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
    text, closing = split_messages(tokenizer, messages)
    assert (text, closing) == ("Be brief.\nWhat?", "\n")
    assert begin_ids(tokenizer, text)[0] == tokenizer.bos_token_id
