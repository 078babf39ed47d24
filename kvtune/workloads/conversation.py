"""A tokenizer's chat template, cut into the token pieces of a timeline: context | question | answer | …

The template is rendered once with sentinels in place of the context, questions and answers, and cut at them;
nothing else is assumed about it. Texts stay as they are, also where a template would trim them. Without a
template, the pieces are joined by newlines.

**Seams.** Each piece is tokenised as it would be behind the text that precedes it, so the pieces together
equal the tokens of the whole rendered conversation, except where the tokenizer would merge characters across
a seam: then each side keeps its own tokens (as with any engine that reuses a shared prefix). Three cases
are usual, each worth a token: a context whose last characters belong to the same pre-token as the blank line
behind it (it ends in a newline; ``.\\n\\n`` under cl100k-like patterns); a generation prompt that ends in two
newlines (one token before generating, two before a word under GPT-2's pattern); and an answer that begins
with the space or newline on which the generation prompt ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from kvtune.errors import InputError
from kvtune.workloads.base import Tokenizer, Turn

# Private-use characters: no template trims, splits or rewrites them.
_CONTEXT = "\ue000context\ue001"
_QUESTION = "\ue000question\ue001"
_ANSWER = "\ue000answer{}\ue001"
_END = "\ue000end\ue001"

# Templates may print today's date with strftime_now; a fixed one keeps token ids the same on every day.
_DATE = datetime(2025, 1, 1)
_FIXED_DATE = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f".replace('%{c}', '{_DATE.strftime(f'%{c}')}')" for c in "dmYybBaAHMSpj")
    + " }}{% endmacro %}\n"
)

# Enough of the preceding text to know how the next piece begins (a leading space, a word boundary).
_LEFT_CHARACTERS = 24

Messages = Sequence[dict[str, str]]


class Conversation:
    """The pieces of conversations of up to ``turns`` turns over a context, for one tokenizer.

    Raises ``InputError`` if the tokenizer's chat template fails or does not show each message once.
    """

    def __init__(self, tokenizer: Tokenizer, turns: int) -> None:
        self._tokenizer = tokenizer
        self._opening, self._questions, self._leads = _cut(tokenizer, turns)

    def context_ids(self, context: str) -> tuple[int, ...]:
        """Tokens [N] from the beginning of the conversation to the end of the context."""
        return begin_ids(self._tokenizer, self._opening + context)

    def turns(self, context: str, exchanges: Sequence[tuple[str, str | None]]) -> tuple[Turn, ...]:
        """The turns of one request over ``context``: for each (question, reference) its exact tokens."""
        turns = []
        left = self._opening + context
        for i, (question, reference) in enumerate(exchanges):
            asked = self._questions[i].replace(_QUESTION, question)
            answer = "" if reference is None else self._leads[i] + reference
            turns.append(
                Turn(
                    question=question,
                    question_ids=encode_after(self._tokenizer, left, asked),
                    reference=reference,
                    reference_ids=encode_after(self._tokenizer, left + asked, answer),
                )
            )
            left = asked + answer
        return tuple(turns)


def split_messages(tokenizer: Tokenizer, messages: Messages) -> tuple[str, str]:
    """A given chat as (text up to the end of its last message, the closing and the generation prompt).

    Without a template the contents are joined by newlines. Raises ``InputError`` if the template fails.
    """
    if not tokenizer.chat_template:
        return "\n".join(message["content"] for message in messages), "\n"
    marked = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END}]
    closing = _after(_render(tokenizer, marked), _END)
    whole = _render(tokenizer, messages)
    if not whole.endswith(closing):
        raise InputError("the tokenizer's chat template rewrites its last message")
    return whole[: len(whole) - len(closing)], closing


def begin_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Tokens of a conversation's beginning; BOS once: a template writes its own, joined text gets one."""
    return encode(tokenizer, text) if tokenizer.chat_template else raw_ids(tokenizer, text)


def raw_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Tokens of a text outside any template: with one leading BOS if the tokenizer adds it by itself."""
    ids, bos = encode(tokenizer, text), _leading_bos(tokenizer)
    return ids if ids[:1] == bos else bos + ids


def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Tokens of ``text``; special tokens written in it count as such, none are added."""
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def encode_after(tokenizer: Tokenizer, left: str, text: str) -> tuple[int, ...]:
    """Tokens of ``text`` as they stand behind ``left``: no leading space is invented in the middle of a line.

    Where the tokenizer would merge across the seam, ``text`` is tokenised on its own (see the module's note).
    """
    if not text:
        return ()
    left = left[-_LEFT_CHARACTERS:]
    head = encode(tokenizer, left)
    both = encode(tokenizer, left + text)
    return both[len(head) :] if both[: len(head)] == head else encode(tokenizer, text)


def _cut(tokenizer: Tokenizer, turns: int) -> tuple[str, list[str], list[str]]:
    """The opening, each turn's question text (holding ``_QUESTION``) and the text that leads in each answer.

    A lead-in is what the template writes between the generation prompt and the answer of an assistant
    message: usually nothing, a space in some.
    """
    if not tokenizer.chat_template:
        return "", [f"\n\n{_QUESTION}\n"] * turns, [""] * turns
    messages = [{"role": "user", "content": f"{_CONTEXT}\n\n{_QUESTION}"}]
    rendered = _render(tokenizer, messages)
    opening = rendered[: len(rendered) - len(_after(rendered, _CONTEXT)) - len(_CONTEXT)]
    questions, leads = [_after(rendered, _CONTEXT)], []
    for i in range(turns):
        answer = _ANSWER.format(i)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": _QUESTION}]
        longer = _render(tokenizer, messages)
        rest = _after(longer, answer)
        before = longer[: len(longer) - len(rest) - len(answer)]
        leads.append(before.removeprefix(rendered) if before.startswith(rendered) else "")
        questions.append(rest)
        rendered = longer
    for text in questions:
        _after(text, _QUESTION)
    return opening, questions[:turns], leads


def _render(tokenizer: Tokenizer, messages: Messages) -> str:
    """The template's text up to and including the generation prompt; thinking off where it has the switch.

    Thinking is off because reference answers follow the generation prompt at once.
    """
    from jinja2.exceptions import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            chat_template=_FIXED_DATE + tokenizer.get_chat_template(),
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise InputError(
            f"the tokenizer's chat template fails on a plain conversation: {error}",
            "use raw prompts (a .txt file), or a tokenizer without a chat template",
        ) from error
    return str(text)


def _after(text: str, sentinel: str) -> str:
    """What follows the sentinel, which must stand there exactly once."""
    _, found, rest = text.partition(sentinel)
    if not found or sentinel in rest:
        raise InputError(
            "the tokenizer's chat template does not show every message once",
            "use raw prompts (a .txt file), or a tokenizer without a chat template",
        )
    return rest


def _leading_bos(tokenizer: Tokenizer) -> tuple[int, ...]:
    """``(bos,)`` if the tokenizer begins plain text with it by itself, else nothing."""
    first = list(tokenizer("a", verbose=False)["input_ids"])[:1]
    return (first[0],) if first and first[0] == tokenizer.bos_token_id else ()
