"""Decode steps of whole models: the wave index through the fused engine against full attention.

Full attention is flash SDPA over all keys in one CUDA graph, like the fused step. The 8B shape has random
weights (its keys are no real ones: speed only); other models are named by path, and ``--prompt code`` gives
them real text. Steps are greedy; beside each stands what the cost model says, given ``--hardware`` and the
page hits. Prefill is one pass with flash attention; the index build is timed warm, behind it
(``index_build_share``) and beside it, a layer each while the model goes on
(``index_build_share_overlapped``: the seconds more of prefill and build together).

Run from the repository root: ``PYTHONPATH=. python benchmarks/live_speed.py --contexts 32768,131072``.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import record as recording
import torch
from prefill_speed import now, prefilled, prefilled_and_built, prompt, seconds
from transformers import LlamaConfig, LlamaForCausalLM

from kvtune.devices import release
from kvtune.hardware import Hardware, step_cost, wave_traffic
from kvtune.models import LoadedModel, Rope, adopt, attention_through, cached, load_model
from kvtune.policies.plan import Plan
from kvtune.policies.wave_index import WaveIndex
from kvtune.profiles.hardware_presets import load_hardware
from kvtune.runtime.full_speed import time_full_steps
from kvtune.runtime.fused_decoder import FusedDecoder
from kvtune.runtime.fused_offload import FusedWaveOffload
from kvtune.runtime.step_prediction import weights_read

STEPS = 48
PLAN = Plan(WaveIndex())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model by path or name; default: the 8B shape")
    parser.add_argument("--rope", help="as in kvtune capture, like yarn:4")
    parser.add_argument("--contexts", default="32768,131072")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--cache", default="0.05", help="page cache fractions of --offload cpu, a row each")
    parser.add_argument("--prompt", choices=("code", "random"), default="random", help="code: needs --model")
    parser.add_argument("--hardware", default="h200", help="machine that the step is predicted on")
    parser.add_argument("--name", default="live_speed")
    options = parser.parse_args()
    if options.prompt == "code" and not options.model:
        parser.error("--prompt code needs a --model with a tokenizer")
    if out := os.environ.get("OUT"):
        recording.RESULTS = Path(out)
    loaded = load_model(options.model, rope=Rope(options.rope)) if options.model else random_8b()
    hardware = load_hardware(options.hardware)
    rows: list[dict[str, Any]] = []
    fractions = [float(part) for part in options.cache.split(",")]
    for context in map(int, options.contexts.split(",")):
        ids = prompt(loaded, options.prompt, context)
        for batch in map(int, options.batches.split(",")):
            try:
                found = measure(loaded, options.model or "8B shape, random weights", ids, batch, fractions)
                rows += [{**predicted(loaded, hardware, row), "prompt": options.prompt} for row in found]
            except torch.OutOfMemoryError:
                print(f"{batch} x {context}: no room")
            release(loaded.device)
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
def measure(
    loaded: LoadedModel, title: str, ids: torch.Tensor, batch: int, fractions: list[float]
) -> list[dict[str, Any]]:
    context = len(ids)
    shape = {"model": Path(title).name, "batch": batch, "context": context}
    cache, prefill = prefilled(loaded, ids)
    for number in range(loaded.geometry.n_layers if batch > 1 else 0):
        layer: Any = cache.layers[number]
        layer.keys = layer.keys.expand(batch, -1, -1, -1).contiguous()
        layer.values = layer.values.expand(batch, -1, -1, -1).contiguous()
    full = median_ms(time_full_steps(loaded, cache, context, STEPS))
    rows = []
    for offload, fraction in [("none", 0.05), *(("cpu", fraction) for fraction in fractions)]:
        release(loaded.device)
        build, steps, decoder = decode(loaded, cache, context, batch, offload, fraction)
        held = sum(sum(layer.gpu_bytes().values()) for layer in decoder.layers)
        hits = page_hits(decoder)
        rows.append(
            {"name": "live_decode_step", "value": steps, "unit": "ms",
             "peer": "full attention, SDPA, CUDA graph", "peer_value": full, "ratio": full / steps,
             "offload": offload, "cache_fraction": fraction if offload == "cpu" else None,
             "page_hit_ratio": hits, "gpu_bytes": held,
             "full_kv_bytes": batch * context * loaded.geometry.kv_bytes_per_token, **shape}
        )  # fmt: skip
        if offload == "none":
            rows.append(share_row("index_build_share", build / (prefill * batch), prefill * batch,
                                  {"build_ms": 1e3 * build, **shape}))  # fmt: skip
        said = "" if hits is None else f", cache {fraction}, page hits {hits:.3f}"
        print(f"{shape} {offload}{said}: step {steps:.2f} ms, full {full:.2f} ms, "
              f"build {1e3 * build:.0f} ms, prefill {1e3 * prefill * batch:.0f} ms, "
              f"held {held / 2**30:.2f} GiB", flush=True)  # fmt: skip
        del decoder
    if batch == 1:
        del cache
        release(loaded.device)
        together, left = prefilled_and_built(loaded, ids, PLAN)
        share = (together - prefill) / prefill
        rows.append(share_row("index_build_share_overlapped", share, prefill,
                              {"together_ms": 1e3 * together, "left_ms": 1e3 * left, **shape}))  # fmt: skip
        print(f"{shape} built beside the prefill: {1e3 * together:.0f} ms against {1e3 * prefill:.0f}, "
              f"{100 * share:.1f}% more, {1e3 * left:.0f} ms of it behind", flush=True)  # fmt: skip
    return rows


def predicted(loaded: LoadedModel, hardware: Hardware, row: dict[str, Any]) -> dict[str, Any]:
    """The row of a step with what the cost model says of it, given its page hits."""
    if row["name"] != "live_decode_step":
        return row
    hits = 1.0 if row["page_hit_ratio"] is None else row["page_hit_ratio"]
    traffic = wave_traffic(loaded.geometry, row["context"], PLAN.policy, hit_ratio=hits)
    cost = step_cost(
        hardware, loaded.geometry, traffic, batch=row["batch"], weights_bytes=weights_read(loaded),
        offload=row["offload"],
    )  # fmt: skip
    print(f"  {row['offload']} {row['cache_fraction']}: predicted {1e3 * cost.seconds:.2f} ms, "
          f"live {row['value']:.2f} ms", flush=True)  # fmt: skip
    return {**row, "predicted_ms": 1e3 * cost.seconds}


def share_row(name: str, share: float, prefill: float, more: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name, "value": 100 * share, "unit": "% of prefill", "peer": "prefill", "peer_value": None,
        "ratio": None, "prefill_ms": 1e3 * prefill, **more,
    }  # fmt: skip


def decode(
    loaded: LoadedModel, cache: Any, context: int, batch: int, offload: str, fraction: float
) -> tuple[float, float, FusedDecoder]:
    """Seconds of a warm index build, median milliseconds of a greedy step, and the decoder."""
    decoder = FusedDecoder(loaded, PLAN, new_tokens=STEPS + 8, offload=offload, cache_fraction=fraction)

    def build() -> None:
        decoder.start(lambda layer, number: sequence(cache, layer, number), [context] * batch)

    times = []
    with attention_through(loaded.model, decoder):
        builds = [seconds(build) for _ in range(2 if offload == "none" else 1)]
        decoder.capture()
        tokens: Any = [7] * batch
        for _ in range(STEPS):
            started = now()
            logits = decoder.step(tokens)
            times.append(now() - started)
            tokens = logits.argmax(1)
    return builds[-1], median_ms(times), decoder


def page_hits(decoder: FusedDecoder) -> float | None:
    """Pages found in the page caches of all layers, of those asked for since the capture."""
    counted = [layer.cache.counters() for layer in decoder.layers if isinstance(layer, FusedWaveOffload)]
    if not counted:
        return None
    hits, asked = torch.stack(counted).sum((0, 1))[1].tolist()
    return hits / asked if asked else None


def sequence(cache: Any, layer: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    if number == 0:
        return cached(cache, layer)
    return cache.layers[layer].keys[number], cache.layers[layer].values[number]


def median_ms(times: list[float]) -> float:
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    main()
