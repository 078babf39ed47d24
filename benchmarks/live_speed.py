"""Decode steps of whole models: the wave index through the fused engine against full attention.

Full attention is flash SDPA over all keys in one CUDA graph, like the fused step. The 8B shape has random
weights (its keys are no real ones: speed only); other models are named by path. Prefill is one pass with
flash attention, and the index build is timed warm, beside it.

Run from the repository root: ``PYTHONPATH=. python benchmarks/live_speed.py --contexts 32768,131072``.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from pathlib import Path
from typing import Any

import record as recording
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtune.models import LoadedModel, Rope, adopt, attention_through, cached, feed, load_model, new_cache
from kvtune.policies.plan import Plan
from kvtune.policies.wave_index import WaveIndex
from kvtune.runtime.full_speed import time_full_steps
from kvtune.runtime.fused_decoder import FusedDecoder

STEPS = 48
CACHE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model by path or name; default: the 8B shape")
    parser.add_argument("--rope", help="as in kvtune capture, like yarn:4")
    parser.add_argument("--contexts", default="32768,131072")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--name", default="live_speed")
    options = parser.parse_args()
    if out := os.environ.get("OUT"):
        recording.RESULTS = Path(out)
    loaded = load_model(options.model, rope=Rope(options.rope)) if options.model else random_8b()
    rows: list[dict[str, Any]] = []
    for context in map(int, options.contexts.split(",")):
        for batch in map(int, options.batches.split(",")):
            try:
                rows += measure(loaded, options.model or "8B shape, random weights", context, batch)
            except torch.OutOfMemoryError:
                print(f"{batch} x {context}: no room")
            gc.collect()
            torch.cuda.empty_cache()
            if rows:
                recording.record(rows, options.name)
    print(recording.table(rows))


def random_8b() -> LoadedModel:
    """Llama 3.1 8B's shape with random weights."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=140000, rope_theta=5e5,
    )  # fmt: skip
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)
    return adopt(model, None, "8B shape, random weights")


@torch.no_grad()
def measure(loaded: LoadedModel, title: str, context: int, batch: int) -> list[dict[str, Any]]:
    shape = {"model": Path(title).name, "batch": batch, "context": context}
    cache, prefill = prefilled(loaded, context)
    for number in range(loaded.geometry.n_layers if batch > 1 else 0):
        layer: Any = cache.layers[number]
        layer.keys = layer.keys.expand(batch, -1, -1, -1).contiguous()
        layer.values = layer.values.expand(batch, -1, -1, -1).contiguous()
    full = median_ms(time_full_steps(loaded, cache, context, STEPS))
    rows = []
    for offload in ("none", "cpu"):
        gc.collect()
        torch.cuda.empty_cache()
        build, steps, held = decode(loaded, cache, context, batch, offload)
        rows.append(
            {"name": "live_decode_step", "value": steps, "unit": "ms",
             "peer": "full attention, SDPA, CUDA graph", "peer_value": full, "ratio": full / steps,
             "offload": offload, "gpu_bytes": held,
             "full_kv_bytes": batch * context * loaded.geometry.kv_bytes_per_token, **shape}
        )  # fmt: skip
        if offload == "none":
            share = 100 * build / (prefill * batch)
            rows.append(
                {"name": "index_build_share", "value": share, "unit": "% of prefill", "peer": "prefill",
                 "peer_value": None, "ratio": None, "build_ms": 1e3 * build,
                 "prefill_ms": 1e3 * prefill * batch, **shape}
            )  # fmt: skip
        print(f"{shape} {offload}: step {steps:.2f} ms, full {full:.2f} ms, build {1e3 * build:.0f} ms, "
              f"prefill {1e3 * prefill * batch:.0f} ms, held {held / 2**30:.2f} GiB", flush=True)  # fmt: skip
    return rows


def decode(
    loaded: LoadedModel, cache: Any, context: int, batch: int, offload: str
) -> tuple[float, float, int]:
    """Seconds of a warm index build, median milliseconds of a step, bytes held on the GPU."""
    plan = Plan(WaveIndex())
    decoder = FusedDecoder(loaded, plan, new_tokens=STEPS + 8, offload=offload, cache_fraction=CACHE)

    def build() -> None:
        decoder.start(lambda layer, number: sequence(cache, layer, number), [context] * batch)

    with attention_through(loaded.model, decoder):
        times = [seconds(build) for _ in range(2 if offload == "none" else 1)]
        decoder.capture()
        steps = median_ms([seconds(lambda: decoder.step([7] * batch)) for _ in range(STEPS)])
    held = sum(sum(layer.gpu_bytes().values()) for layer in decoder.layers)
    return times[-1], steps, held


def prefilled(loaded: LoadedModel, context: int) -> tuple[Any, float]:
    """A cache of ``context`` random tokens, filled in one pass, and the seconds of the best pass."""
    generator = torch.Generator().manual_seed(context)
    ids = torch.randint(3, 30000, (context,), generator=generator).to(loaded.device)
    times = []
    for _ in range(2 if context <= 40000 else 1):
        cache = new_cache()
        times.append(seconds(lambda cache=cache: feed(loaded.model, ids, cache)))
    return cache, min(times)


def sequence(cache: Any, layer: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    if number == 0:
        return cached(cache, layer)
    return cache.layers[layer].keys[number], cache.layers[layer].values[number]


def seconds(body: Any) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    body()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def median_ms(times: list[float]) -> float:
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    main()
