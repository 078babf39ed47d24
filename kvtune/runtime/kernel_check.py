"""Whether the kernels run on this device and compute what the policies do, before a model decodes by them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtune.attention import sparse_attention
from kvtune.geometry import LayerInfo
from kvtune.models import LoadedModel
from kvtune.policies.base import Policy
from kvtune.policies.plan import Plan
from kvtune.policies.wave_index import WaveIndex
from kvtune.runtime.fused_layer import LayerStore
from kvtune.runtime.fused_methods import fused_layer
from kvtune.runtime.fused_wave import SEGMENT


def check_kernels(loaded: LoadedModel, plan: Plan, offload: str = "none") -> str | None:
    """Why the kernels must not decode ``plan`` on the model's device; ``None`` if they may.

    One step of each kind of layer, over a few hundred random tokens in the model's shape and precision, is
    held loosely to the policy's own selection and attention. Done once in a process for a method and a shape.
    """
    geometry = loaded.geometry
    for number in range(geometry.n_layers):
        info = geometry.layer(number)
        policy = plan.for_layer(info)
        key = (type(policy), replace(info, layer=0), loaded.model.dtype, loaded.device, offload)
        if key not in _checked:
            _checked[key] = _check_layer(policy, info, loaded.model.dtype, loaded.device, offload)
        if (reason := _checked[key]) is not None:
            return reason
    return None


_checked: dict[Hashable, str | None] = {}
"""What :func:`check_kernels` has found in this process."""
_MORE_TOKENS = 300
"""Tokens of a check beyond the steady zone."""
_TOPICS = 16
"""Keys lie about so many centres, a query near one: whichever of its keys are chosen, results agree."""
_SHARPNESS = 20.0
"""Logit of a query with the keys of its centre."""
_LOOSE = 0.05
"""Relative error of an output that passes."""


def _check_layer(
    policy: Policy, info: LayerInfo, dtype: torch.dtype, device: torch.device, offload: str
) -> str | None:
    try:
        with torch.inference_mode(False), torch.no_grad():
            tokens = _MORE_TOKENS + getattr(policy, "sink", 0) + getattr(policy, "local", 0)
            tokens += SEGMENT if isinstance(policy, WaveIndex) else 0
            error = _step_error(policy, info, _Prompt.random(policy, info, tokens, dtype, device), offload)
    except Exception as failure:  # whatever a compiler, a driver or a launch may raise
        lines = str(getattr(failure, "error_message", None) or failure).strip().splitlines()
        said = f"{type(failure).__name__}: {lines[0]}" if lines else type(failure).__name__
        return f"the kernels for {policy.name} fail here ({said})"
    if error < _LOOSE:
        return None
    return f"the kernels for {policy.name} do not compute here what they should (off by {error:.1%})"


@dataclass(frozen=True)
class _Prompt:
    """keys [H, n + 1, d], values [H, n + 1, dv] and prompt queries [H, G, W, d]; a query [H, G, d] at n."""

    keys: Tensor
    values: Tensor
    seen: Tensor
    query: Tensor

    @classmethod
    def random(
        cls, policy: Policy, info: LayerInfo, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> _Prompt:
        generator = torch.Generator().manual_seed(0)
        heads, dim, window = info.n_kv_heads, info.head_dim, min(policy.prompt_window, tokens)

        def new(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        centres, meanings = new(heads, _TOPICS, dim), new(heads, _TOPICS, info.value_dim)
        topics = torch.randint(_TOPICS, (tokens + 1,), generator=generator)
        keys = centres[:, topics] + 0.1 * new(heads, tokens + 1, dim)
        values = meanings[:, topics] + 0.03 * new(heads, tokens + 1, info.value_dim)
        wanted = torch.cat([topics[tokens - window : tokens], topics[:1]])
        near = centres[:, None, wanted] + 0.1 * new(heads, info.group, window + 1, dim)
        queries = near * (_SHARPNESS / (dim * info.scaling))
        keys, values, queries = (part.to(device, dtype) for part in (keys, values, queries))
        return cls(keys, values, queries[:, :, :-1], queries[:, :, -1])


def _step_error(policy: Policy, info: LayerInfo, prompt: _Prompt, offload: str) -> float:
    """The largest relative error of a query head's output in one decode step, fused against the policy's."""
    keys, values, tokens = prompt.keys, prompt.values, prompt.keys.shape[1] - 1
    layer = fused_layer(policy, info, 1, offload, cache_fraction=0.5)
    store = LayerStore.empty(info, 1, layer.room([tokens], 1), keys.dtype, keys.device)
    store.put(0, 0, keys[:, :tokens], values[:, :tokens])
    store.lengths = [tokens]
    layer.start(store, [prompt.seen] if policy.prompt_window else None)
    layer.log = layer.new_log(torch.zeros(1, dtype=torch.int64, device=keys.device), 1)
    new_key, new_value = (part[None, :, tokens].contiguous() for part in (keys, values))
    found = layer.attend(prompt.query.flatten(0, 1)[None].contiguous(), new_key, new_value)
    layer.join()
    at = torch.tensor([tokens], device=keys.device)
    index = policy.build(keys[:, :tokens], values[:, :tokens], prompt.seen, info)
    policy.append(index, keys[:, tokens:], values[:, tokens:], at)
    selection = policy.select(index, prompt.query[None], at)
    wanted, _ = sparse_attention(prompt.query[None], at, keys, values, selection, info)
    wanted = wanted.flatten(1, 2).float()
    return float(((found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
