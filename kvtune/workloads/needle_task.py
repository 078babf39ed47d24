"""What tasks with needles in a haystack have in common: how many needles there are and who asks for which."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator

from kvtune.workloads.base import Request, Sample, Tokenizer, Workload, sample_rng
from kvtune.workloads.conversation import Conversation
from kvtune.workloads.haystack import Needle, hide, make_needles, needle_offset, spread_depths


class NeedleTask(Workload):
    """Needles spread over one context of filler; each turn asks for the number of one of them."""

    @abstractmethod
    def needles(self, turns: int, requests: int) -> int:
        """How many needles a context hides."""

    @abstractmethod
    def asked(
        self, rng: random.Random, needles: list[Needle], turns: int, requests: int
    ) -> list[list[Needle]]:
        """For each request, the needles that its turns ask for."""

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
            needles = make_needles(rng, self.needles(turns, requests))
            text = hide(conversation, needles, spread_depths(offset, i, len(needles)), context_tokens, rng)
            asked = self.asked(rng, needles, turns, requests)
            yield Sample(
                task=self.name,
                context_ids=conversation.context_ids(text),
                requests=tuple(
                    Request(conversation.turns(text, [(needle.question, needle.number) for needle in order]))
                    for order in asked
                ),
            )
