"""Runs in the environment of kvpress: what its presses keep of one prompt of a tiny random model.

Usage: ``python kvpress_peer.py OUT.npz``. Per layer: keys [H, N, d] and the last queries [Hq, W, d], both
after RoPE; per press and layer, the positions kept [H, K], sorted, and PyramidKV's number of tokens.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from kvpress import PyramidKVPress, SnapKVPress, StreamingLLMPress
from kvpress.utils import get_prerope_query_states
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import rotate_half

LAYERS, TOKENS, WINDOW, BETA = 4, 240, 16, 2
PRESSES = {
    "snapkv": SnapKVPress(compression_ratio=0.75, window_size=WINDOW, kernel_size=5),
    "snapkv_kernel_1": SnapKVPress(compression_ratio=0.5, window_size=WINDOW, kernel_size=1),
    "pyramidkv": PyramidKVPress(compression_ratio=0.75, window_size=WINDOW, kernel_size=5, beta=BETA),
    "streaming": StreamingLLMPress(compression_ratio=0.75, n_sink=4),
}


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def window_queries(module, hidden_states, position_embeddings):
    """The last queries after RoPE, [Hq, W, d]."""
    queries = get_prerope_query_states(module, hidden_states[:, -WINDOW:])
    cos, sin = (part[:, -WINDOW:].unsqueeze(1) for part in position_embeddings)
    return (queries * cos + rotate_half(queries) * sin)[0]


def recording(name, press, found):
    """Let ``press`` note, layer by layer, what it sees and which positions it keeps."""
    compress = press.compress

    def noting(module, hidden_states, keys, values, attentions, kwargs):
        layer = module.layer_idx
        found[f"keys_{layer}"] = keys[0]
        found[f"queries_{layer}"] = window_queries(module, hidden_states, kwargs["position_embeddings"])
        where = torch.arange(keys.shape[2], dtype=keys.dtype)[:, None].expand_as(values)
        _, kept = compress(module, hidden_states, keys, where, attentions, kwargs)
        found[f"{name}_{layer}"] = kept[0, :, :, 0].long().sort(-1).values
        if isinstance(press, PyramidKVPress):
            found[f"{name}_tokens_{layer}"] = torch.tensor(press.get_layer_budget(module, keys.shape[2]))
        return keys, values

    press.compress = noting


def main(out: str) -> None:
    llama = model()
    tokens = torch.randint(0, 97, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    found: dict[str, torch.Tensor] = {}
    for name, press in PRESSES.items():
        recording(name, press, found)
        with torch.no_grad(), press(llama):
            llama(tokens)
    np.savez(out, **{name: tensor.numpy() for name, tensor in found.items()})


if __name__ == "__main__":
    main(sys.argv[1])
