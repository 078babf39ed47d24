"""Prompts from a file of the user's own: a plain text, or JSON lines of prompts, chats or contexts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtune.errors import InputError
from kvtune.workloads.base import Request, Sample, Tokenizer, Turn, Workload
from kvtune.workloads.conversation import Conversation, begin_ids, encode_after, raw_ids, split_messages
from kvtune.workloads.prompt_lines import ChatPrompt, ContextPrompt, Prompt, RawPrompt, parse_line


@dataclass(frozen=True)
class _Line:
    number: int
    prompt: Prompt


class PromptFile(Workload):
    """The prompts of a file as samples, in the file's order; the texts are checked when it is opened.

    ``name.txt`` is one raw prompt. Each line of ``name.jsonl`` is one of
    ``{"prompt", "reference"?}``: raw text, no chat template, the whole text is the context;
    ``{"messages", "reference"?}``: a chat that ends with the user's message: all of it is the context;
    ``{"context", "requests": [{"turns": [{"question", "reference"?}]}]}``.

    In ``samples`` a ``context_tokens`` cuts longer raw prompts and contexts to their first tokens (a chat
    that is longer is an ``InputError``); shorter ones stay as they are. At most ``n`` samples come,
    ``len(self)`` if the file has fewer. The file says how many requests and turns there are: those arguments
    and the seed have no effect.

    Raises ``InputError`` if the file is missing, not UTF-8, empty, or has a bad line (with its number).
    """

    name = "prompts"
    title = "prompts from a file"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        text = _read(self.path)
        if self.path.suffix == ".txt":
            self._lines = [_Line(1, RawPrompt(text, None))]
        else:
            numbered = enumerate(text.split("\n"), start=1)
            self._lines = [
                _Line(i, parse_line(line, f"{self.path}: line {i}")) for i, line in numbered if line.strip()
            ]

    def __len__(self) -> int:
        return len(self._lines)

    def samples(
        self,
        tokenizer: Tokenizer,
        context_tokens: int | None,
        n: int,
        turns: int,
        requests: int,
        seed: int,
    ) -> Iterator[Sample]:
        self.checked(context_tokens, n, turns, requests)
        for line in self._lines[:n]:
            context_ids, asked = _tokenise(tokenizer, line.prompt)
            if not context_ids:
                raise InputError(f"{self.path}: line {line.number}: the prompt has no tokens")
            if context_tokens is not None and len(context_ids) > context_tokens:
                if isinstance(line.prompt, ChatPrompt):
                    raise InputError(
                        f"{self.path}: line {line.number}: the chat has {len(context_ids)} tokens, "
                        f"more than --context {context_tokens}",
                        "raise --context, or give the text as a context with questions, which can be cut",
                    )
                context_ids = context_ids[:context_tokens]
            yield Sample(task=self.name, context_ids=context_ids, requests=asked)


def _tokenise(tokenizer: Tokenizer, prompt: Prompt) -> tuple[tuple[int, ...], tuple[Request, ...]]:
    """The context's tokens and the requests of one prompt."""
    if isinstance(prompt, ContextPrompt):
        conversation = Conversation(tokenizer, max(len(exchanges) for exchanges in prompt.requests))
        return conversation.context_ids(prompt.context), tuple(
            Request(conversation.turns(prompt.context, exchanges)) for exchanges in prompt.requests
        )
    if isinstance(prompt, RawPrompt):
        text, closing, question = prompt.text, "", ""
        context_ids = raw_ids(tokenizer, text)
    else:
        text, closing = split_messages(tokenizer, prompt.messages)
        question = prompt.messages[-1]["content"]
        context_ids = begin_ids(tokenizer, text)
    turn = Turn(
        question=question,
        question_ids=encode_after(tokenizer, text, closing),
        reference=prompt.reference,
        reference_ids=encode_after(tokenizer, text + closing, prompt.reference or ""),
    )
    return context_ids, (Request((turn,)),)


def _read(path: Path) -> str:
    if path.suffix not in (".txt", ".jsonl"):
        raise InputError(f"prompt file {path} must end in .txt or .jsonl")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"prompt file {path} does not exist") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"prompt file {path} is not UTF-8 (byte {error.start})", "save it again as UTF-8"
        ) from None
    except OSError as error:
        raise InputError(f"prompt file {path} cannot be read: {error.strerror}") from None
    if not text.strip():
        raise InputError(f"prompt file {path} is empty")
    return text
