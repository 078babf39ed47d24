"""How much text fits into a budget of tokens, found with a few tokenisations of the whole."""

from __future__ import annotations

from collections.abc import Callable

# A context this close below its budget is close enough; the last unit or two are not worth a tokenisation.
SLACK_TOKENS = 2


def largest_fitting(count: Callable[[int], int], budget: int, upper: int) -> int | None:
    """A k in [0, upper] with ``count(k) <= budget`` that uses the budget as well as possible.

    ``count(k)`` is the number of tokens of the text made of k units; it grows with k (a merge at the cut may
    bend it by a token). The result is the largest such k, or any whose count lies within ``SLACK_TOKENS`` of
    the budget. ``None`` if not even k = 0 fits. Interpolates between the bounds and bisects every third step,
    so that a whole context is tokenised a handful of times and never more than about 3·log2(upper) times.
    """
    low, low_count = 0, count(0)
    if low_count > budget:
        return None
    high, high_count = upper, count(upper) if upper else low_count
    if high_count <= budget:
        return upper
    step = 0
    while high - low > 1 and budget - low_count > SLACK_TOKENS:
        step += 1
        middle = (low + high) // 2
        if step % 3:
            share = (budget - low_count) / (high_count - low_count)
            middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        tokens = count(middle)
        if tokens <= budget:
            low, low_count = middle, tokens
        else:
            high, high_count = middle, tokens
    return low
