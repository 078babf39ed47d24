"""Gemma's tokenizer out of a GGUF file, the same whichever transformers release reads it.

The file holds SentencePiece's vocabulary without merges. Releases before 5.24 rank the merges by the stored
scores, which do not follow Gemma's order, and cut common words into pieces.
"""

from __future__ import annotations

from typing import Any

from gguf import TokenType
from tokenizers import AddedToken
from transformers import GemmaTokenizer

ARCHITECTURES = ("gemma", "gemma2", "gemma3")
"""GGUF's names of the models that have this tokenizer."""
END_OF_TURN = "<end_of_turn>"


def gemma_tokenizer(reader: Any) -> Any:
    """The tokenizer in the file that ``reader`` (a ``GGUFReader``) has open."""

    def value(key: str, default: Any = None) -> Any:
        field = reader.get_field(f"tokenizer.{key}")
        return default if field is None else field.contents()

    words, types = value("ggml.tokens"), value("ggml.token_type")
    # Runs of spaces are stored as such, though every other token spells a space as SentencePiece does.
    words = [word.replace(" ", "▁") if word.isspace() else word for word in words]
    added = {word for word, kind in zip(words, types) if kind == TokenType.USER_DEFINED}
    pairs: Any = merges(words, added)
    tokenizer = GemmaTokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=pairs,
        add_bos_token=value("ggml.add_bos_token", True),
        add_eos_token=value("ggml.add_eos_token", False),
    )
    tokenizer.add_tokens(
        [
            AddedToken(word, normalized=False, special=kind == TokenType.CONTROL)
            for word, kind in zip(words, types)
            if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
        ]
    )
    tokenizer.chat_template = value("chat_template")
    return tokenizer


def merges(words: list[str], first: set[str]) -> list[tuple[str, str]]:
    """The merges that a vocabulary implies, best first: every way to make a word of two others.

    SentencePiece merges what makes the earliest word. Those in ``first`` were put into the vocabulary by
    hand and come before all others, the longest left half before shorter ones.
    """
    known = set(words)
    found = []
    for index, word in enumerate(words):
        rank = -1 if word in first else index
        for cut in range(len(word) - 1, 0, -1):
            left, right = word[:cut], word[cut:]
            if left in known and right in known:
                found.append((rank, -len(left), -len(right), left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]
