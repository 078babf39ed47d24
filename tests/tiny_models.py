"""Tiny random models of several families, a toy tokenizer and a workload of given samples, for any test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from kvtune.models import LoadedModel, adopt
from kvtune.workloads import Request, Sample, Turn, Workload

VOCABULARY = 96
EOS = 2
WINDOW = 12
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SMALL, initializer_range=0.3),
    "qwen3": lambda: Qwen3Config(**_SMALL, head_dim=16, initializer_range=0.3),
    "qwen2_windows": lambda: Qwen2Config(
        **_SMALL, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, initializer_range=0.3
    ),
    "mistral": lambda: MistralConfig(**_SMALL, sliding_window=WINDOW, head_dim=8, initializer_range=0.3),
    "gemma3": lambda: Gemma3TextConfig(
        **_SMALL,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=_HYBRID,
        query_pre_attn_scalar=25,
        initializer_range=0.3,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(
        **{key: value for key, value in _SMALL.items() if key != "num_key_value_heads"}, initializer_range=0.3
    ),
}


def tiny_model(family: str = "llama", seed: int = 0) -> PreTrainedModel:
    """A random model of a family of ``CONFIGS``, float32, in evaluation mode."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="sdpa").eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words w3 … w95; no chat template."""
    words = {"<pad>": 0, "<s>": 1, "</s>": EOS, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def tiny_loaded(family: str = "llama", seed: int = 0) -> LoadedModel:
    """:func:`tiny_model` with its tokenizer, as the instrument wants it."""
    return adopt(tiny_model(family, seed), tiny_tokenizer(), f"tiny-{family}")


def tokens(n: int, seed: int = 0) -> tuple[int, ...]:
    """``n`` ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCABULARY, (n,), generator=generator).tolist())


class GivenSamples(Workload):
    """A workload of samples made by hand."""

    name = "given"
    title = "samples made by hand"

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = list(samples)

    def samples(
        self, tokenizer: Any, context_tokens: int | None, n: int, turns: int, requests: int, seed: int
    ) -> Iterator[Sample]:
        yield from self._samples


def toy_workload(
    samples: int = 2, context: int = 40, requests: int = 2, turns: int = 2, references: bool = True
) -> GivenSamples:
    """Random tokens; every question and reference has another length."""
    made = []
    for s in range(samples):
        asked = []
        for r in range(requests):
            parts = []
            for t in range(turns):
                seed = 100 * s + 10 * r + t + 1
                reference = tokens(3 + t + r, 7 * seed) if references else ()
                text = " ".join(f"w{i}" for i in reference) if references else None
                parts.append(Turn(f"question {seed}", tokens(4 + t + 2 * r, seed), text, reference))
            asked.append(Request(tuple(parts)))
        made.append(Sample("given", tokens(context + s, 1000 + s), tuple(asked)))
    return GivenSamples(made)
