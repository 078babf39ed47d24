"""PyramidKV: SnapKV with more room in the lower layers and less in the upper ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.policies.base import check
from kvtune.policies.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV whose room before the window falls from layer to layer; on average ``capacity`` (1024) tokens.

    Of A = capacity - window tokens on average, the last layer gets A // ``beta`` (20), the first
    2·A - A // beta, and those between step down evenly (:func:`past_budget`, ``PyramidKVCluster`` in
    KVCache-Factory's pyramidkv_utils.py). ``window`` (32), ``kernel`` (5) and ``pooling`` are SnapKV's.

    As in that code, a prompt shorter than ``capacity`` is kept whole, one below 2·A gets A in every layer,
    and where the first layer would get more than there is, the last layer gets the rest. kvpress
    computes the same line in floating point, but counts the window inside it, and gives every layer the same
    where the last would get less than a window.
    """

    window: int = 32
    beta: int = 20

    name: ClassVar[str] = "pyramidkv"
    title: ClassVar[str] = "PyramidKV"
    source: ClassVar[str] = "Cai et al., arXiv 2406.02069; Zefan-Cai/KVCache-Factory"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.beta >= 1, self, f"beta must be 1 or more, not {self.beta}")

    def past_tokens(self, length: int, layer: LayerInfo) -> int:
        if length < self.capacity:
            return length - self.window
        average = self.capacity - self.window
        return past_budget(length, average, self.window, self.beta, layer.layer, layer.n_layers)

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        return {
            **super().search_space(trial, geometry, context_length),
            "beta": trial.suggest_categorical("beta", [5, 10, 20]),
        }


def past_budget(length: int, average: int, window: int, beta: int, layer: int, n_layers: int) -> int:
    """Tokens that ``layer`` keeps before the window of a prompt of ``length``: ``average`` over all layers.

    All integers, as in ``PyramidKVCluster.update_kv``: floor divisions, so a layer may miss up to one token
    a layer of its share.
    """
    if length < 2 * average or n_layers == 1:
        return average
    last = average // beta
    first = 2 * average - last
    if first >= length - window:
        first = length - window
        last = 2 * average - first
    return first - layer * ((first - last) // (n_layers - 1))
