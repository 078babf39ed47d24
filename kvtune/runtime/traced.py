"""The conversations of a trace run again on its model: a live check of policies compared on the trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtune.errors import InputError
from kvtune.models import Rope, load_model
from kvtune.policies.base import Policy
from kvtune.progress import Progress
from kvtune.runtime.live import live
from kvtune.traces import Timeline, Trace
from kvtune.workloads import Request, Sample, Turn


class TracedRuns:
    """The first ``count`` samples of ``trace``, forced to their recorded tokens; called with a policy.

    Loads the trace's model, with its rope. Raises ``InputError`` for a count that the trace does not hold,
    and where the model found is not the one traced.
    """

    def __init__(self, trace: Trace, count: int, seed: int = 0, progress: Progress | None = None) -> None:
        if not 1 <= count <= trace.n_samples:
            raise InputError(f"--live must lie in 1…{trace.n_samples}, the samples of the trace, not {count}")
        rope = trace.manifest.get("rope") or {}
        wanted = Rope(rope.get("override"), rope.get("length"))
        self.loaded = load_model(trace.model, rope=wanted, progress=progress)
        if self.loaded.fingerprint != trace.fingerprint:
            raise InputError(
                f"the trace is of another '{trace.model}' than the model found under that name",
                "run without --live",
            )
        self.samples = [traced_sample(trace, number) for number in range(count)]
        self.seed = seed

    def __call__(self, policy: Policy) -> dict[str, Any]:
        """``kl`` (nats per step, ``mean`` and ``p95``), ``delta_nll`` and ``top1`` against full attention."""
        found = live(self.loaded, self.samples, policy, decode=1, seed=self.seed, free=False, forecast=False)
        return {name: found[name] for name in ("kl", "delta_nll", "top1")}


def traced_sample(trace: Trace, sample: int) -> Sample:
    """The context, questions and answers that a sample's timelines went through, as a workload's sample."""
    longest: dict[int, Timeline] = {}
    for timeline in trace.timelines(sample):
        known = longest.get(timeline.request)
        if known is None or len(timeline) >= len(known):
            longest[timeline.request] = timeline
    first = next(iter(longest.values()))
    context = [s for s in first.segments if s.kind == "context"]
    ids = first.token_ids[: context[-1].stop if context else 0].tolist()
    task = next((record.task for record in trace.samples if record.sample == sample), "traced")
    requests = tuple(Request(tuple(_turns(timeline))) for timeline in longest.values())
    return Sample(task, tuple(ids), requests)


def _turns(timeline: Timeline) -> Iterator[Turn]:
    """Question and answer of each turn on the timeline."""
    ids, question = timeline.token_ids.tolist(), (0, 0)
    for segment in timeline.segments:
        if segment.kind == "question":
            question = (segment.start, segment.stop)
        elif segment.kind in ("generated", "fed_back"):
            asked, question = tuple(ids[slice(*question)]), (0, 0)
            yield Turn("", asked, None, tuple(ids[segment.start : segment.stop]))
