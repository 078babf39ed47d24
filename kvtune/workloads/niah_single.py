"""``niah_single``: find a number hidden in filler, at depths that vary from sample to sample."""

from __future__ import annotations

from collections.abc import Iterator

from kvtune.workloads.base import Request, Sample, Tokenizer, Workload, sample_rng
from kvtune.workloads.conversation import Conversation
from kvtune.workloads.haystack import hide, make_needles, needle_offset, spread_depths


class NiahSingle(Workload):
    """Every question asks for a needle of its own: one turn and one request make a single needle."""

    name = "niah_single"
    title = "a number hidden in filler, one needle a question"

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
            needles = make_needles(rng, turns * requests)
            depths = spread_depths(offset, i, len(needles))
            text = hide(conversation, needles, depths, context_tokens, rng)
            rng.shuffle(needles)
            exchanges = [(needle.question, needle.number) for needle in needles]
            yield Sample(
                task=self.name,
                context_ids=conversation.context_ids(text),
                requests=tuple(
                    Request(conversation.turns(text, exchanges[r * turns : (r + 1) * turns]))
                    for r in range(requests)
                ),
            )
