"""Gemma's tokenizer from a GGUF file: SentencePiece's merges come back from the order of its words."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.models.gemma_tokenizer import gemma_tokenizer, merges

NORMAL, CONTROL, BY_HAND, BYTE = 1, 3, 4, 6
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]


class _File:
    """What a ``GGUFReader`` offers of a file's metadata."""

    def __init__(self, **values: Any) -> None:
        self._values = {f"tokenizer.{key.replace('__', '.')}": value for key, value in values.items()}

    def get_field(self, key: str) -> Any:
        if key not in self._values:
            return None
        return SimpleNamespace(contents=lambda: self._values[key])


def vocabulary() -> tuple[list[str], list[int]]:
    """Words and their types in the order of a Gemma file: by hand, bytes, merged words, characters."""
    groups = [
        (SPECIAL, CONTROL),
        (["\n\n", "  ", "   "], BY_HAND),
        ([f"<0x{byte:02X}>" for byte in range(256)], BYTE),
        (["▁t", "he", "▁the", "the", "th", "12"], NORMAL),
        ([*"▁\nthe12x"], NORMAL),
    ]
    return (
        [word for words, _ in groups for word in words],
        [kind for words, kind in groups for _ in words],
    )


def tokenizer(**more: Any) -> Any:
    words, types = vocabulary()
    return gemma_tokenizer(_File(ggml__tokens=words, ggml__token_type=types, **more))


def sentence_piece(text: str, words: list[str], by_hand: set[str]) -> list[str]:
    """SentencePiece's BPE, slowly: the best word that two neighbours make, leftmost first, to the end."""
    rank = {word: -1 if word in by_hand else index for index, word in enumerate(words)}
    pieces = list(text)
    while True:
        pairs = [(rank[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in rank]
        if not pairs:
            return pieces
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


@given(st.text("the12x ", max_size=12))
def test_words_are_cut_as_sentence_piece_cuts_them(text: str):
    words, types = vocabulary()
    words = [word.replace(" ", "▁") for word in words]
    by_hand = {word for word, kind in zip(words, types) if kind == BY_HAND}
    made = tokenizer()
    found = made.convert_ids_to_tokens(made(text, add_special_tokens=False)["input_ids"])
    assert found == sentence_piece(text.replace(" ", "▁"), words, by_hand)


def test_the_earliest_word_is_merged_first():
    """Stored scores would say otherwise in Gemma's files, so that they are not looked at."""
    assert merges(["ab", "bc", "a", "b", "c"], set()) == [("a", "b"), ("b", "c")]
    assert merges(["bc", "ab", "a", "b", "c"], set()) == [("b", "c"), ("a", "b")]
    assert merges(["ab", "bc", "a", "b", "c"], {"bc"}) == [("b", "c"), ("a", "b")]


def test_every_split_of_a_word_is_a_merge():
    words = ["a", "aa", "aaa"]
    assert merges(words, set()) == [("a", "a"), ("aa", "a"), ("a", "aa")]


@pytest.mark.parametrize("text", ["the  12", "\n\n x", "  the", "é<end_of_turn>", "▁"])
def test_text_comes_back(text: str):
    made = tokenizer()
    ids = made(text, add_special_tokens=False)["input_ids"]
    assert made.decode(ids) == text.replace("▁", " ")


def test_special_tokens_are_whole_and_skipped():
    made = tokenizer()
    ids = made("<start_of_turn>the<end_of_turn>")["input_ids"]
    assert made.convert_ids_to_tokens(ids) == ["<bos>", "<start_of_turn>", "the", "<end_of_turn>"]
    assert made.decode(ids, skip_special_tokens=True) == "the"
    assert (made.bos_token_id, made.eos_token_id, made.pad_token_id) == (2, 1, 0)


def test_flags_and_template_are_the_files():
    made = tokenizer(ggml__add_bos_token=False, chat_template="{{ messages }}")
    assert made("the")["input_ids"][0] != made.bos_token_id
    assert made.chat_template == "{{ messages }}" and tokenizer().chat_template is None
