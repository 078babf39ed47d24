"""A tiny random Llama that the runtime tests share."""

from __future__ import annotations

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtune.geometry import ModelGeometry

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    initializer_range=0.4,
)
GEOMETRY = ModelGeometry(
    n_layers=3,
    n_heads=6,
    n_kv_heads=2,
    head_dim=8,
    value_dim=8,
    dtype="float32",
    max_positions=4096,
    scaling=8**-0.5,
    windows=(None,) * 3,
    softcaps=(None,) * 3,
    sinks=(False,) * 3,
)


def tiny_model() -> LlamaForCausalLM:
    """Three layers, 6 query and 2 kv heads, weights large enough that attention matters."""
    torch.manual_seed(0)
    return LlamaForCausalLM(copy.deepcopy(CONFIG)).eval()
