"""What the device can do, one measurement a function. Without a GPU the device is the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kvtune.hardware.clock import graphed, seconds_of, wall_seconds_of
from kvtune.hardware.machine import GatherRate

ROW_BYTES = (256, 2048)
"""Rows that are gathered: one key of 128 16-bit values, and a page's eight."""

_NARROW = 128
"""Width of layers whose weights take no time."""
_FEW, _MANY = 4, 20
"""Layers of the two models that time a layer's overhead."""


def read_rate(device: torch.device, n_bytes: int, repeats: int) -> float:
    """Bytes per second of reading ``n_bytes`` once: the better of a sum and a matrix-vector product."""
    matrix = torch.ones(max(n_bytes // (4 * 4096), 1), 4096, dtype=torch.float32, device=device)
    vector = torch.ones(4096, dtype=torch.float32, device=device)
    best = min(
        seconds_of(matrix.sum, device, repeats),
        seconds_of(partial(torch.mv, matrix, vector), device, repeats),
    )
    return matrix.nbytes / best


def copy_rate(device: torch.device, n_bytes: int, repeats: int) -> float:
    """Bytes per second of a copy of ``n_bytes``, those read and those written."""
    source = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * n_bytes / seconds_of(partial(target.copy_, source), device, repeats)


def gather_rates(device: torch.device, n_bytes: int, repeats: int) -> tuple[GatherRate, ...]:
    """Bytes per second of gathering half of ``n_bytes`` in rows at random, those read and those written."""
    return tuple(
        GatherRate(row_bytes=row, bytes_per_second=_gather_rate(device, n_bytes, row, repeats))
        for row in ROW_BYTES
    )


def _gather_rate(device: torch.device, n_bytes: int, row_bytes: int, repeats: int) -> float:
    rows = torch.ones(max(n_bytes // row_bytes, 2), row_bytes // 2, dtype=torch.bfloat16, device=device)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(rows), generator=generator)[: len(rows) // 2].to(device)
    target = torch.empty(len(chosen), rows.shape[1], dtype=rows.dtype, device=device)
    body = partial(torch.index_select, rows, 0, chosen, out=target)
    return 2 * target.nbytes / seconds_of(body, device, repeats)


def matmul_rate(device: torch.device, size: int, repeats: int) -> float:
    """Floating-point operations per second of a square bfloat16 matrix product."""
    left = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    right, target = torch.ones_like(left), torch.empty_like(left)
    return 2.0 * size**3 / seconds_of(partial(torch.mm, left, right, out=target), device, repeats)


def kernel_seconds(device: torch.device, count: int, repeats: int) -> float:
    """Starting one small kernel from Python, ``count`` of them back to back."""
    return wall_seconds_of(_small_kernels(device, count), device, repeats) / count


def node_seconds(device: torch.device, count: int, repeats: int) -> float | None:
    """One small kernel as a node of a CUDA graph that follows another; ``None`` where there are no graphs."""
    replay = graphed(_small_kernels(device, count), device)
    return None if replay is None else seconds_of(replay, device, repeats) / count


def step_overheads(device: torch.device, repeats: int) -> tuple[float, float]:
    """Seconds of a decoder layer without attention and its weights' bytes, and of a step beside its layers.

    From transformers' Llama, so narrow that its weights take no time, with few layers and with more; one
    token, in a CUDA graph where there are graphs.
    """
    few, many = (_narrow_step(device, layers, repeats) for layers in (_FEW, _MANY))
    layer = max(many - few, 0.0) / (_MANY - _FEW)
    return layer, max(few - _FEW * layer, 0.0)


def weights_rate(device: torch.device, width: int, repeats: int) -> float:
    """Bytes per second at which one token's products read the weights of a layer ``width`` wide.

    The shapes are an 8B model's in proportion. What the same products of a narrow layer take, their starts,
    is taken off: a layer's overhead counts it.
    """
    wide, narrow = _Products(device, width), _Products(device, _NARROW)
    took, started = (seconds_of(graphed(one, device) or one, device, repeats) for one in (wide, narrow))
    return wide.weights_bytes / max(took - started, 0.1 * took)


class _Products:
    """The seven products of a Llama layer with one token: q, k, v, o, gate, up, down."""

    def __init__(self, device: torch.device, width: int) -> None:
        wide, kv = width * 7 // 2, width // 4
        self.weights = [
            torch.zeros(rows, columns, dtype=torch.bfloat16, device=device)
            for rows, columns in (
                (width, width), (kv, width), (kv, width), (width, width), (wide, width), (wide, width),
                (width, wide),
            )
        ]  # fmt: skip
        self.tokens = {
            size: torch.zeros(1, size, dtype=torch.bfloat16, device=device) for size in (width, wide)
        }

    @property
    def weights_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def __call__(self) -> None:
        for weight in self.weights:
            torch.nn.functional.linear(self.tokens[weight.shape[1]], weight)


def _narrow_step(device: torch.device, layers: int, repeats: int) -> float:
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvtune.models import PassingCache, attention_through, decode_step

    config = LlamaConfig(
        vocab_size=64, hidden_size=_NARROW, intermediate_size=_NARROW * 7 // 2, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.to(device=device, dtype=torch.bfloat16)
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)

    def body() -> None:
        decode_step(model, token, token, PassingCache())

    with attention_through(model, lambda module, query, *_, **__: (query.transpose(1, 2), None)):
        return seconds_of(graphed(body, device) or body, device, repeats)


def _small_kernels(device: torch.device, count: int) -> Callable[[], None]:
    number = torch.zeros(1, device=device)

    def body() -> None:
        for _ in range(count):
            number.add_(1.0)

    return body
