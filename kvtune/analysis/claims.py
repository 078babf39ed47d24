"""Claims of papers and articles that a trace can check, each with its measured value and a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvtune.analysis.summary import Summary
from kvtune.analysis.text import percent


@dataclass(frozen=True)
class Claim:
    """``holds`` is ``None`` where this trace cannot tell; ``measured`` says in words what was found."""

    claim: str
    source: str
    measured: str
    value: float | None
    holds: bool | None


def claims(summary: Summary) -> list[dict[str, Any]]:
    """Every claim of the table below that this trace has something to say about, as plain mappings."""
    found = (check(summary) for check in _CHECKS)
    return [asdict(claim) for claim in found if claim is not None]


def _cosine(summary: Summary) -> Claim | None:
    mean = summary.of("query_cosine", 1).mean
    if math.isnan(mean):
        return None
    return Claim(
        "Queries of adjacent decode steps have a cosine above 0.85",
        "CTkvr, arXiv 2512.15550 (which says above 0.8), and articles on it",
        f"mean cosine {mean:.2f}",
        mean,
        mean > 0.85,
    )


def _adjacent_overlap(summary: Summary) -> Claim | None:
    mean, chance = summary.of("overlap", 1).mean, summary.of("overlap_chance", 1).mean
    if math.isnan(mean):
        return None
    return Claim(
        "Adjacent decode steps share most of their top-100 tokens",
        "CTkvr, arXiv 2512.15550",
        f"{percent(mean)} in common; chance alone would give {percent(chance)}",
        mean,
        None if chance > 0.5 else mean > 0.5,
    )


def _far_overlap(summary: Summary) -> Claim | None:
    mean, chance = summary.of("overlap", 20).mean, summary.of("overlap_chance", 20).mean
    if math.isnan(mean):
        return None
    return Claim(
        "Twenty steps apart, about 31% of the top-100 tokens are still in common (within 10 points)",
        "RetroInfer, arXiv 2505.02922",
        f"{percent(mean)} in common; chance alone would give {percent(chance)}",
        mean,
        None if chance > 0.31 else abs(mean - 0.31) <= 0.10,
    )


def _first_layers(summary: Summary) -> Claim | None:
    first = [number for number in summary.layers if number < 2]
    rest = [number for number in summary.layers if number >= 2]
    if len(first) < 2 or not rest:
        return None
    shares = {number: summary.of("token_share_95", None, number).mean for number in summary.layers}
    low = min(shares[number] for number in first)
    others = sorted(shares[number] for number in rest)[len(rest) // 2]
    if math.isnan(low) or math.isnan(others):
        return None
    return Claim(
        "The first two layers are not sparse (95% of the mass takes over 10% of the tokens, "
        "and more than elsewhere)",
        "Quest, arXiv 2406.10774, and others keep them dense",
        f"layers 0 and 1: {percent(shares[0])} and {percent(shares[1])} of the tokens; "
        f"median of the other layers: {percent(others)}",
        low,
        low > 0.10 and low > others,
    )


def _neighbouring_layers(summary: Summary) -> Claim | None:
    mean, chance = summary.of("layer_overlap").mean, summary.of("layer_overlap_chance").mean
    if math.isnan(mean):
        return None
    return Claim(
        "Top-100 tokens of neighbouring layers overlap (at least twice as much as by chance)",
        "articles on cross-layer reuse",
        f"{percent(mean)} in common; chance alone would give {percent(chance)}",
        mean,
        None if chance > 0.5 else mean >= 2 * chance,
    )


def _late_tokens(summary: Summary) -> Claim | None:
    mean = summary.of("late_mass").mean
    if math.isnan(mean):
        return None
    return Claim(
        "Tokens made while decoding matter: they carry at least 10% of the attention mass",
        "an index built on the prompt alone does not hold them",
        f"{percent(mean)} of the mass lies after the prompt",
        mean,
        mean >= 0.10,
    )


def _recall(summary: Summary) -> Claim | None:
    mean = summary.of("recall_index").mean
    if math.isnan(mean):
        return None
    budget = summary.of("effective_tokens").mean / summary.of("visible_tokens").mean
    return Claim(
        "At a healthy budget, recall@100 is above 0.85",
        "RetroInfer, arXiv 2505.02922",
        f"index recall {mean:.2f} with {percent(budget)} of the tokens attended exactly",
        mean,
        mean > 0.85,
    )


def _estimation(summary: Summary) -> Claim | None:
    without = summary.of("error_without_estimation").mean
    if math.isnan(without):
        return None
    layers = [n for n in summary.layers if summary.of("error_without_estimation", None, n).count]
    pairs = [(summary.of("error", None, n), summary.of("error_without_estimation", None, n)) for n in layers]
    total = sum(found.count for found, _ in pairs)
    with_zone = sum(found.total for found, _ in pairs) / total
    without = sum(bare.total for _, bare in pairs) / total
    saved = 1 - with_zone / without if without else 0.0
    return Claim(
        "The estimation zone lowers the output error",
        "RetroInfer, arXiv 2505.02922",
        f"mean error {with_zone:.3f} with it, {without:.3f} without it ({percent(saved)} less)",
        saved,
        saved > 0,
    )


def _turns(summary: Summary) -> Claim | None:
    turns = summary.turns()
    first, last = (summary.of_turn("error", turns[place]).mean for place in (0, -1))
    if len(turns) < 2 or math.isnan(first) or math.isnan(last):
        return None
    return Claim(
        "The output error does not grow over turns (not above 1.1 times the first turn's)",
        "SCBench, arXiv 2412.10319: true of methods that keep every token, not of those that evict",
        f"mean error {first:.3f} in the first turn, {last:.3f} in the last",
        last / first if first else None,
        last <= 1.1 * first,
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
