"""``live``: decode the real model under a plan, and hold it to full attention and to the simulator."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtune.analysis.statistics import bootstrap_interval
from kvtune.caching import AccessLog, HitRatio, check_budgets, simulate
from kvtune.capturing.loop import Mark, Session
from kvtune.errors import InputError
from kvtune.models import LoadedModel
from kvtune.policies import get_policy
from kvtune.policies.base import Policy
from kvtune.policies.plan import Plan, as_plan
from kvtune.progress import Progress, silent
from kvtune.runtime.decoding import Answer, forced_pass, full_pass, prefilling
from kvtune.runtime.hook import attached
from kvtune.runtime.sequence import Sequence
from kvtune.workloads import Request, Sample

DEFAULT_STEPS = 32


@dataclass
class LiveRun:
    """Everything measured: one entry per answer, the accesses, and whether the replay agreed.

    kl, top1 [steps] per answer; nll_full, nll_plan [targets] per answer (nats per forced token).
    """

    kl: list[Tensor] = field(default_factory=list)
    top1: list[Tensor] = field(default_factory=list)
    nll_full: list[Tensor] = field(default_factory=list)
    nll_plan: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0
    full_seconds: float = 0.0
    requests: int = 0
    log: AccessLog | None = None
    hits: dict[tuple[int, int, int, int], list[bool]] = field(default_factory=dict)
    counters: dict[str, list[int]] = field(
        default_factory=lambda: {"request": [0, 0], "page": [0, 0], "token": [0, 0]}
    )


def live(
    loaded: LoadedModel,
    samples: Iterable[Sample],
    plan: Policy | Plan | str = "wave_index",
    *,
    cache_fraction: float = 0.05,
    decode: int = DEFAULT_STEPS,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Decode each request of ``samples`` under ``plan`` and compare with full attention.

    Each answer is forced to the same tokens in both runs: the reference, continued by full attention's
    greedy choice to ``decode`` tokens. Returns the JSON document of ``kvtune live``: KL to full attention
    and top-1 agreement over all steps, paired ΔNLL over the reference's tokens (over all where there is no
    reference) with a bootstrap interval over answers, the live cache's hit ratios, those of the simulator's
    replay of the run's own access log, and decode speed. The cache counts and does not yet move data.

    Raises ``InputError`` for a cache fraction outside (0, 1], a policy that evicts, or no decode steps.
    """
    chosen = as_plan(get_policy(plan) if isinstance(plan, str) else plan)
    check_budgets([cache_fraction])
    if chosen.policy.evicts:
        raise InputError(f"policy '{chosen.policy.name}' evicts tokens and cannot run live yet")
    if decode < 1:
        raise InputError(f"--decode must be at least 1, not {decode}")
    run = LiveRun()
    with (progress or silent).task("live decoding", None) as task:
        for number, sample in enumerate(samples):
            _check_length(loaded, sample, decode)
            session = Session(loaded)
            session.feed(sample.context_ids)
            run_one = _Runner(session, sample, chosen, cache_fraction, decode, run)
            for request_number, request in enumerate(sample.requests):
                run_one(request, (number, request_number))
                task.advance()
    if not run.requests:
        raise InputError("there was no request to run")
    return _document(run, chosen, cache_fraction, seed)


@dataclass
class _Runner:
    """Runs requests over one context, which ``session`` holds."""

    session: Session
    sample: Sample
    plan: Plan
    cache_fraction: float
    decode: int
    run: LiveRun

    def __call__(self, request: Request, unit: tuple[int, int]) -> None:
        """One request twice: full attention, then the plan, forced to the same tokens."""
        context = self.session.mark()
        answers = full_pass(self.session, request, self.decode)
        self.session.rewind(context)
        loaded = self.session.loaded
        sequence = Sequence(self.plan, loaded.geometry, self.cache_fraction)
        with attached(loaded.model, sequence):
            self._show_prompt_tail(sequence)
            forced = forced_pass(self.session, request, answers, sequence)
        self.session.rewind(context)
        for full, sparse in zip(answers, forced):
            _compare(full, sparse, self.run, loaded)
        _collect(sequence, self.run, unit)
        self.run.requests += 1

    def _show_prompt_tail(self, sequence: Sequence) -> None:
        """Run the context's last tokens once more through the hook where the policy wants their queries."""
        tail = min(self.plan.policy.prompt_window, len(self.sample.context_ids))
        if tail:
            end = self.session.mark()
            self.session.rewind(Mark(end.length - tail, end.logits))
            with prefilling(sequence):
                self.session.feed(self.sample.context_ids[-tail:])


def _compare(full: Answer, sparse: Answer, run: LiveRun, loaded: LoadedModel) -> None:
    reference = torch.log_softmax(full.logits, -1)
    other = torch.log_softmax(sparse.logits, -1)
    run.kl.append((reference.exp() * (reference - other)).sum(-1))
    run.top1.append((reference.argmax(-1) == other.argmax(-1)).float())
    following = [*full.tokens[1:]]
    if full.n_reference:
        end = sorted(loaded.eos_ids)[:1]
        following = [*full.tokens[1 : full.n_reference], *end]
    targets = torch.tensor(following, dtype=torch.int64, device=reference.device)
    rows = torch.arange(len(targets), device=reference.device)
    run.nll_full.append(-reference[rows, targets])
    run.nll_plan.append(-other[rows, targets])
    run.seconds += sparse.seconds
    run.full_seconds += full.seconds


def _collect(sequence: Sequence, run: LiveRun, unit: tuple[int, int]) -> None:
    log = sequence.access_log(*unit)
    if run.log is None:
        run.log = AccessLog(log.page_bytes)
    run.log.units.update(log.units)
    run.hits.update(sequence.hit_masks(*unit))
    for state in sequence.layers.values():
        for cache in state.caches:
            for name, counter in (
                ("request", cache.counters.requests),
                ("page", cache.counters.pages),
                ("token", cache.counters.tokens),
            ):
                run.counters[name][0] += counter[0]
                run.counters[name][1] += counter[1]


def replay(run: LiveRun, cache_fraction: float) -> tuple[HitRatio | None, bool | None]:
    """The simulator on the run's own log: its hit ratios, and whether every access agrees."""
    if run.log is None or not any(len(a.blocks) for _, a in run.log):
        return None, None
    (result,) = simulate(run.log, [cache_fraction], "wave", keep_hits=True)
    equal = True
    for unit, accesses in run.log:
        pages = result.units[unit].page_hits
        assert pages is not None
        first = np.cumsum(accesses.pages) - accesses.pages
        equal = equal and pages[first].tolist() == run.hits[unit]
    return result.hit_ratio, equal


def _document(run: LiveRun, plan: Plan, cache_fraction: float, seed: int) -> dict[str, Any]:
    kl = torch.cat(run.kl).double()
    sums = np.array([float((b - a).sum()) for a, b in zip(run.nll_full, run.nll_plan)])
    counts = np.array([len(a) for a in run.nll_full])
    low, high = bootstrap_interval(sums, counts, seed=seed)
    replayed, equal = replay(run, cache_fraction)
    steps = len(kl)
    hit_ratio = {name: (hits / asked if asked else None) for name, (hits, asked) in run.counters.items()}
    return {
        "policy": plan.policy.name,
        "params": plan.policy.parameters(),
        "dense_layers": list(plan.dense_layers),
        "cache_fraction": cache_fraction,
        "requests": run.requests,
        "answers": len(run.kl),
        "decode_steps": steps,
        "kl": {"mean": float(kl.mean()), "p95": float(kl.quantile(0.95))},
        "delta_nll": {
            "mean": float(sums.sum() / counts.sum()) if counts.sum() else None,
            "low": None if math.isnan(low) else low,
            "high": None if math.isnan(high) else high,
        },
        "top1": float(torch.cat(run.top1).mean()),
        "hit_ratio": hit_ratio,
        "replayed_hit_ratio": dict.fromkeys(hit_ratio) if replayed is None else replayed.to_dict(),
        "replay_equal": equal,
        "tokens_per_second": steps / run.seconds,
        "full_tokens_per_second": steps / run.full_seconds,
    }


def _check_length(loaded: LoadedModel, sample: Sample, decode: int) -> None:
    """Refuse a sample longer than the model can serve before anything is run."""
    longest = max(
        sum(len(t.question_ids) + max(decode, len(t.reference_ids)) for t in request.turns)
        for request in sample.requests
    )
    total = len(sample.context_ids) + longest
    if total > loaded.geometry.max_positions:
        raise InputError(
            f"the longest timeline has {total} tokens, the model takes {loaded.geometry.max_positions}",
            "lower --context, or raise the limit with --rope yarn:4",
        )
