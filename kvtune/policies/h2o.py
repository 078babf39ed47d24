"""H2O: a cache of fixed size that keeps recent tokens and those with most attention so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtune.attention.scores import shape_scores
from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.policies.base import Policy, Selection, check
from kvtune.policies.keys import KeyStore
from kvtune.policies.observed import attention_mass, best_tokens, no_prompt_queries, summed_attention

SCORE_BYTES = 4


@dataclass
class Run:
    """The cache after the step at ``last``: tokens kept [H, K], ascending, and their scores [H, K]."""

    first: int
    last: int
    kept: Tensor
    scores: Tensor


@dataclass
class HeavyHitters:
    """All keys of the layer, the prompt tokens' scores [H, N], and one run per parameters.

    ``scores`` is ``None`` where the trace holds no prompt queries.
    """

    store: KeyStore
    scores: Tensor | None
    runs: dict[H2O, Run] = field(default_factory=dict)


@dataclass(frozen=True)
class H2O(Policy):
    """Keep the most recent tokens (``recent_ratio`` 0.1 of the prompt) and as many heavy hitters.

    A token's score is the attention it has received so far, summed over queries and the GQA group. Before
    each step the token that leaves the recent part competes with the ``heavy_ratio`` (0.1 of the
    prompt's length) heavy ones, and the lowest score is dropped for good. The step attends what is left and
    adds its attention to the scores. Both parts hold ``min_tokens`` (64) at least: the code has no floor, and
    0.1 of a short prompt is next to nothing.

    Differences: the code's scores start from the attention of all prompt queries; a trace holds the last
    ones, of which ``prompt_queries`` (1024) are used: tokens that only earlier queries attended count for
    less, and the full sum's favour for early tokens goes. Heads of a group share one cache, by the sum of
    their attention. Tokens without a recorded query (a later turn's question, a fed-back answer) enter
    with score 0 and give none. A step reads the scores of the kept tokens, 4 bytes each. Without prompt
    queries a prompt above the budget is refused, as is a layer with a window of its own.
    """

    heavy_ratio: float = 0.1
    recent_ratio: float = 0.1
    min_tokens: int = 64
    prompt_queries: int = 1024

    name: ClassVar[str] = "h2o"
    title: ClassVar[str] = "H2O heavy hitters"
    source: ClassVar[str] = "Zhang et al., arXiv 2306.14048; FMInference/H2O"
    budget: ClassVar[str | None] = "heavy_ratio"
    evicts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("heavy_ratio", "recent_ratio"):
            value = getattr(self, name)
            check(0 <= value <= 1, self, f"{name} must lie in [0, 1], not {value}")
        for name in ("min_tokens", "prompt_queries"):
            check(getattr(self, name) >= 1, self, f"{name} must be 1 or more, not {getattr(self, name)}")

    @property
    def prompt_window(self) -> int:
        return self.prompt_queries

    def build_key(self) -> tuple[Any, ...]:
        return (self.prompt_queries,)

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> HeavyHitters:
        check(layer.window is None, self, f"layer {layer.layer} has a sliding window; keep it dense")
        scores = summed_attention(prompt_queries, keys, layer) if prompt_queries.shape[2] else None
        return HeavyHitters(KeyStore(keys, values, layer), scores)

    def append(self, index: HeavyHitters, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        index.store.append(keys, values)

    def budgets(self, prompt_length: int) -> tuple[int, int]:
        """Heavy and recent tokens of the cache after a prompt of ``prompt_length`` tokens."""
        heavy, recent = (int(ratio * prompt_length) for ratio in (self.heavy_ratio, self.recent_ratio))
        return max(heavy, self.min_tokens), max(recent, self.min_tokens)

    def select(self, index: HeavyHitters, queries: Tensor, positions: Tensor) -> Selection:
        """Steps advance the run of these parameters; its first step again starts over from the prompt.

        Raises ``ValueError`` where a call goes back to the midst of a run.
        """
        run = self._run(index, int(positions[0]))
        kept, scan = [], []
        for query, position in zip(queries, positions.tolist()):
            self._step(index, run, query, position)
            kept.append(run.kept)
            full = run.kept.shape[1] == sum(self.budgets(index.store.prompt_length))
            scan.append(SCORE_BYTES * run.kept.shape[1] if full else 0)
        width = kept[-1].shape[1]
        rows = torch.stack([pad(row, (0, width - row.shape[1]), value=-1) for row in kept])
        scan_bytes = torch.tensor(scan, device=queries.device)
        return Selection(rows, scan_bytes[:, None].expand(-1, queries.shape[1]))

    def _run(self, index: HeavyHitters, first: int) -> Run:
        """The run to go on with, or a new one from the end of the prompt."""
        run = index.runs.get(self)
        if run is not None and first > run.last:
            return run
        if run is not None and first > run.first:
            raise ValueError(f"h2o: step {first} comes after step {run.last} was taken")
        heads, n = index.store.keys.shape[0], index.store.prompt_length
        kept = torch.arange(n, device=index.store.keys.device).expand(heads, -1)
        if index.scores is None and n + 1 > sum(self.budgets(n)):
            raise no_prompt_queries(self, index.store.layer)
        scores = torch.zeros_like(kept, dtype=torch.float32) if index.scores is None else index.scores
        index.runs[self] = Run(first, n - 1, kept, scores)
        return index.runs[self]

    def _step(self, index: HeavyHitters, run: Run, query: Tensor, position: int) -> None:
        """Take in the tokens up to ``position``, drop what exceeds the budget, attend and score the rest."""
        heads = len(run.kept)
        new = torch.arange(run.last + 1, position + 1, device=run.kept.device).expand(heads, -1)
        kept = torch.cat([run.kept, new], 1)
        scores = pad(run.scores, (0, new.shape[1]))
        heavy, recent = self.budgets(index.store.prompt_length)
        if kept.shape[1] > heavy + recent:
            best = best_tokens(scores[:, :-recent], heavy).sort(1).values
            tail = torch.arange(kept.shape[1] - recent, kept.shape[1], device=kept.device)
            columns = torch.cat([best, tail.expand(heads, -1)], 1)
            kept, scores = kept.gather(1, columns), scores.gather(1, columns)
        run.kept, run.last = kept, position
        run.scores = scores + self._attention(index.store, kept, query, position)

    def _attention(self, store: KeyStore, kept: Tensor, query: Tensor, position: int) -> Tensor:
        """Attention of one step's queries [H, G, d] over the tokens kept [H, K], summed over the group."""
        rows = kept[..., None].expand(-1, -1, store.keys.shape[2])
        dots = torch.matmul(query.float(), store.keys.gather(1, rows).float().transpose(1, 2))
        logits = shape_scores(dots, store.layer, (position - kept)[:, None, :])
        return attention_mass(logits[None], store.layer)[0].sum(1)

    def index_bytes(self, index: HeavyHitters, layer: LayerInfo) -> int:
        held = min(sum(self.budgets(index.store.prompt_length)), index.store.length)
        return SCORE_BYTES * held * index.store.keys.shape[0]

    @classmethod
    def lossless(cls, n: int) -> dict[str, Any]:
        return {"heavy_ratio": 1.0, "min_tokens": max(n, 1)}

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        return {
            "heavy_ratio": trial.suggest_float("heavy_ratio", 0.01, 0.5, log=True),
            "recent_ratio": trial.suggest_float("recent_ratio", 0.01, 0.5, log=True),
        }
