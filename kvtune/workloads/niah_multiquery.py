"""``niah_multiquery``: five numbers hidden in one context; each turn of a conversation asks for another."""

from __future__ import annotations

from collections.abc import Iterator

from kvtune.workloads.base import Request, Sample, Tokenizer, Workload, sample_rng
from kvtune.workloads.conversation import Conversation
from kvtune.workloads.haystack import hide, make_needles, needle_offset, spread_depths

_NEEDLES = 5


class NiahMultiquery(Workload):
    """All requests share the needles (five, or one a turn if there are more turns), each in its own order."""

    name = "niah_multiquery"
    title = "five numbers hidden in filler, one asked a turn"
    default_turns = _NEEDLES

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
        offset = needle_offset(self.name, seed)
        for i in range(n):
            rng = sample_rng(self.name, seed, i)
            needles = make_needles(rng, max(turns, _NEEDLES))
            text = hide(conversation, needles, spread_depths(offset, i, len(needles)), context_tokens, rng)
            asked = [rng.sample(needles, turns) for _ in range(requests)]
            yield Sample(
                task=self.name,
                context_ids=conversation.context_ids(text),
                requests=tuple(
                    Request(conversation.turns(text, [(needle.question, needle.number) for needle in order]))
                    for order in asked
                ),
            )
