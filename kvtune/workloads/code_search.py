"""``code_search``: from a function's description to its name, in the source of Python's standard library."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from kvtune.errors import InputError
from kvtune.workloads.base import Request, Sample, Tokenizer, Turn, Workload, sample_rng
from kvtune.workloads.conversation import Conversation
from kvtune.workloads.fitting import largest_fitting
from kvtune.workloads.stdlib_source import Function, documented_functions, read_source, source_files

_INTRODUCTION = "Here is source code of the Python standard library. I will ask you about its functions.\n\n"
_CHARACTERS_PER_TOKEN = 5  # a first guess, on the high side for code
_ATTEMPTS = 24


class CodeSearch(Workload):
    """Source files in random order fill the context (the last one is cut at the budget).

    Each question quotes the first paragraph of a docstring of a function that stands whole in the context and
    has its name to itself there; all questions of a sample are about different functions.
    """

    name = "code_search"
    title = "name the function of the Python standard library that a text describes"

    def samples(
        self,
        tokenizer: Tokenizer,
        context_tokens: int | None,
        n: int,
        turns: int,
        requests: int,
        seed: int,
    ) -> Iterator[Sample]:
        context_tokens = self.checked(context_tokens, n, turns, requests)
        conversation = Conversation(tokenizer, turns)
        for i in range(n):
            rng = sample_rng(self.name, seed, i)
            text, functions = _context(conversation, context_tokens, turns * requests, rng)
            exchanges = [(_question(function), function.name) for function in functions]
            yield Sample(
                task=self.name,
                context_ids=conversation.context_ids(text),
                requests=tuple(
                    Request(conversation.turns(text, exchanges[r * turns : (r + 1) * turns]))
                    for r in range(requests)
                ),
            )

    def score(self, turn: Turn, generated_text: str) -> float | None:
        """1.0 if the name stands in the generated text as a whole word, else 0.0."""
        if turn.reference is None:
            return None
        return float(re.search(rf"\b{re.escape(turn.reference)}\b", generated_text) is not None)


def _question(function: Function) -> str:
    return (
        f'Which function in the code above is described by this text: "{function.description}" '
        "Answer with the name of the function only."
    )


def _context(
    conversation: Conversation, budget: int, questions: int, rng: random.Random
) -> tuple[str, list[Function]]:
    """A context within the budget and ``questions`` functions in it, or else an ``InputError``."""
    most = 0
    for _ in range(_ATTEMPTS):
        names = list(source_files())
        rng.shuffle(names)
        text, starts = _fill(conversation, names, budget)
        functions = _functions(text, starts)
        if len(functions) >= questions:
            return text, rng.sample(functions, questions)
        most = max(most, len(functions))
    raise InputError(
        f"contexts of {budget} tokens of source hold {most} documented functions at best, "
        f"{questions} question{'s are' if questions > 1 else ' is'} asked for",
        "raise --context, or ask for fewer turns or requests",
    )


def _fill(conversation: Conversation, names: list[str], budget: int) -> tuple[str, dict[str, int]]:
    """Files in the given order up to the budget: (text, where each file's source starts [characters])."""
    wanted = budget * _CHARACTERS_PER_TOKEN
    while True:
        text, starts = _gather(names, wanted)
        ends = [0, *(match.end() for match in re.finditer(r"\s+|\w+|[^\w\s]", text))]

        def count(k: int, text: str = text, ends: list[int] = ends) -> int:
            return len(conversation.context_ids(_INTRODUCTION + text[: ends[k]]))

        k = largest_fitting(count, budget, len(ends) - 1)
        if k is None:
            raise InputError(
                f"a context of {budget} tokens is too short for any source code", "raise --context"
            )
        if k < len(ends) - 1:
            break
        if wanted > len(text):
            raise InputError(
                f"the Python standard library's source is shorter than {budget} tokens", "lower --context"
            )
        wanted *= 2
    shift = len(_INTRODUCTION)
    return _INTRODUCTION + text[: ends[k]], {name: start + shift for name, start in starts.items()}


def _gather(names: list[str], wanted: int) -> tuple[str, dict[str, int]]:
    """The first ``wanted`` characters of the files that document functions, each under its name."""
    parts: list[str] = []
    starts: dict[str, int] = {}
    length = 0
    for name in filter(documented_functions, names):
        heading = f"# File: {name}\n"
        starts[name] = length + len(heading)
        parts.append(f"{heading}{read_source(name).rstrip()}\n\n")
        length += len(parts[-1])
        if length >= wanted:
            break
    return "".join(parts)[:wanted], starts


def _functions(text: str, starts: dict[str, int]) -> list[Function]:
    """Functions to ask about: whole within the text, their names and descriptions unique in it."""
    defined: dict[str, int] = {}
    for name in re.findall(r"\bdef\s+(\w+)", text):
        defined[name] = defined.get(name, 0) + 1
    described: dict[str, list[Function]] = {}
    for file, start in starts.items():
        for function in documented_functions(file):
            if start + function.end <= len(text) and defined.get(function.name) == 1:
                described.setdefault(function.description, []).append(function)
    return [functions[0] for functions in described.values() if len(functions) == 1]
