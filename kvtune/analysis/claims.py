"""Claims of papers and articles that a trace can check, each with its measured value and a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvtune.analysis.summary import Summary
from kvtune.analysis.text import number, percent, tokens

HEALTHY_TOKENS = 1000


@dataclass(frozen=True)
class Claim:
    """A claim and what this trace says to it.

    ``test`` is the rule behind ``holds``, which is ``None`` where this trace cannot tell; ``measured`` says
    in words what was found, ``value`` its main number.
    """

    claim: str
    test: str
    measured: str
    value: float | None
    holds: bool | None
    source: str


def claims(summary: Summary) -> list[dict[str, Any]]:
    """Every claim that this trace has something to say about, as plain mappings."""
    found = (check(summary) for check in _CHECKS)
    return [asdict(claim) for claim in found if claim is not None]


def _cosine(summary: Summary) -> Claim | None:
    mean = summary.of("query_cosine", 1).mean
    if math.isnan(mean):
        return None
    return Claim(
        "adjacent queries: cosine above 0.85",
        "mean cosine of the queries of adjacent decode steps > 0.85",
        f"{mean:.2f}",
        mean,
        mean > 0.85,
        "articles on CTkvr; the paper, arXiv 2512.15550, says above 0.8",
    )


def _adjacent_overlap(summary: Summary) -> Claim | None:
    mean, chance = summary.of("overlap", 1).mean, summary.of("overlap_chance", 1).mean
    if math.isnan(mean):
        return None
    return Claim(
        "adjacent steps share most top tokens",
        "mean overlap@100 of adjacent decode steps > 50% (no verdict where chance alone gives as much)",
        f"{percent(mean)} (chance {percent(chance)})",
        mean,
        None if chance > 0.5 else mean > 0.5,
        "CTkvr, arXiv 2512.15550",
    )


def _far_overlap(summary: Summary) -> Claim | None:
    mean, chance = summary.of("overlap", 20).mean, summary.of("overlap_chance", 20).mean
    if math.isnan(mean):
        return None
    return Claim(
        "20 steps apart they still share ~31%",
        "mean overlap@100 of decode steps 20 apart between 21% and 41%",
        f"{percent(mean)} (chance {percent(chance)})",
        mean,
        None if chance > 0.31 else abs(mean - 0.31) <= 0.10,
        "RetroInfer, arXiv 2505.02922",
    )


def _first_layers(summary: Summary) -> Claim | None:
    rest = [number for number in summary.layers if number >= 2]
    if not {0, 1} <= set(summary.layers) or not rest:
        return None
    shares = {layer: summary.of("token_share_95", None, layer).mean for layer in summary.layers}
    low, others = min(shares[0], shares[1]), sorted(shares[layer] for layer in rest)[len(rest) // 2]
    if math.isnan(low) or math.isnan(others):
        return None
    return Claim(
        "the first two layers are not sparse",
        "in layers 0 and 1, 95% of the mass takes more than 10% of the tokens, and more than in the median "
        "of the other layers",
        f"{percent(shares[0])}, {percent(shares[1])} (others {percent(others)})",
        low,
        low > 0.10 and low > others,
        "Quest, arXiv 2406.10774, keeps them dense",
    )


def _neighbouring_layers(summary: Summary) -> Claim | None:
    mean, chance = summary.of("layer_overlap").mean, summary.of("layer_overlap_chance").mean
    if math.isnan(mean):
        return None
    return Claim(
        "neighbouring layers share top tokens",
        "the top 100 tokens (mean probability over heads) of a layer and the layer below have at least "
        "twice as many in common as by chance",
        f"{percent(mean)} (chance {percent(chance)})",
        mean,
        None if chance > 0.5 else mean >= 2 * chance,
        "articles on cross-layer reuse",
    )


def _late_tokens(summary: Summary) -> Claim | None:
    mean = summary.of("late_mass").mean
    if math.isnan(mean):
        return None
    return Claim(
        "tokens after the prompt matter",
        "tokens made while decoding (or fed in later turns) carry at least 10% of the attention mass",
        f"{percent(mean)} of the mass",
        mean,
        mean >= 0.10,
        "kvtune's own rule: an index built on the prompt alone does not hold them",
    )


def _recall(summary: Summary) -> Claim | None:
    mean, budget = summary.of("recall_index").mean, summary.of("effective_tokens").mean
    if math.isnan(mean):
        return None
    enough = budget >= HEALTHY_TOKENS
    return Claim(
        "recall@100 above 0.85 at a healthy budget",
        f"index recall@100 > 0.85 (under {HEALTHY_TOKENS:,} effective tokens a failure decides nothing)",
        f"{mean:.2f} at {tokens(budget)} tokens",
        mean,
        mean > 0.85 if enough or mean > 0.85 else None,
        "RetroInfer, arXiv 2505.02922",
    )


def _estimation(summary: Summary) -> Claim | None:
    bare = [summary.of("error_without_estimation", None, layer) for layer in summary.layers]
    used = [layer for layer, found in zip(summary.layers, bare) if found.count]
    if not used:
        return None
    exact = [summary.of("error", None, layer) for layer in used]
    with_zone = sum(found.total for found in exact) / sum(found.count for found in exact)
    without = sum(found.total for found in bare) / sum(found.count for found in bare)
    saved = 1 - with_zone / without if without else 0.0
    return Claim(
        "the estimation zone lowers the error",
        "mean output error with it < without it, over the layers that use it",
        f"{number(with_zone)}, without {number(without)}",
        saved,
        saved > 0,
        "RetroInfer, arXiv 2505.02922",
    )


def _turns(summary: Summary) -> Claim | None:
    turns = summary.turns()
    if len(turns) < 2:
        return None
    first, last = summary.of_turn("error", turns[0]).mean, summary.of_turn("error", turns[-1]).mean
    if math.isnan(first) or math.isnan(last):
        return None
    return Claim(
        "the error does not grow over turns",
        "mean output error of the last turn ≤ 1.1 × that of the first",
        f"{number(first)} first, {number(last)} last",
        last / first if first else None,
        last <= 1.1 * first,
        "SCBench, arXiv 2412.10319, of methods that keep every token; those that evict get worse",
    )


_CHECKS: tuple[Callable[[Summary], Claim | None], ...] = (
    _cosine,
    _adjacent_overlap,
    _far_overlap,
    _first_layers,
    _neighbouring_layers,
    _late_tokens,
    _recall,
    _estimation,
    _turns,
)
