"""RetroInfer, v0 and v1: ``config/<model basename>.json`` and the arguments that must go with it.

Both generations read the JSON and then let ``generate_config()`` overwrite most of it from command-line
arguments, so an export is always both files. What ``generate_config()`` fixes itself survives only where the
JSON is passed straight to ``generate(attn_config=...)``: such settings are in the JSON and in the list of
what is not expressible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtune.geometry import PAGE_TOKENS
from kvtune.policies import retroinfer as formulas
from kvtune.policies.wave_index import WaveIndex
from kvtune.profiles.exporters.base import Exporter, Ledger, as_json
from kvtune.profiles.resolved import DENSE

SHIPPED_CORES = 22
MODELS = (
    "gradientai/Llama-3-8B-Instruct-Gradient-1048k",
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-72B-Instruct",
)
V1_MODELS = (*MODELS, "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B")
FAMILIES = ("Llama", "Qwen")
DIRECT = "the JSON keeps it where it is passed as attn_config"
DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Wanted:
    """What the profile asks of the wave index at one context length (a full-attention profile: defaults)."""

    policy: WaveIndex
    context: int
    full: bool
    fraction: float | None

    @property
    def retrieval(self) -> float:
        return self.policy.retrieval

    @property
    def estimation(self) -> float:
        """Share of the clusters to estimate: all that are not retrieved where the policy says so."""
        return 1.0 if self.policy.estimate == "all" else self.policy.estimation


def write_v1(ledger: Ledger) -> Mapping[str, str]:
    """v1: every count follows from context length and budgets; ``cache_ratio`` 0 means 3 × nprobe."""
    wanted = _wanted(ledger)
    policy = wanted.policy
    counts = policy.counts(wanted.context)
    gpu_only = wanted.fraction == 1.0
    ratio = wanted.fraction or 0.0
    page_share = policy.tokens_per_centroid / (PAGE_TOKENS * counts.pages_per_cluster)
    config = {
        "static_pattern_start": policy.sink,
        "static_pattern_end": policy.local,
        "core": _cores(ledger),
        "n_centroids": counts.n_centroids,
        "n_segment": counts.n_segment,
        "pages_per_cluster": counts.pages_per_cluster,
        "retrieval_budget": wanted.retrieval,
        "estimation_budget": wanted.estimation,
        "cache_ratio": ratio * page_share,
        "buffer_cluster_num": _buffer_clusters(wanted),
        "use_cuda_graph": False,
        "gpu_only": gpu_only,
    }
    arguments = {
        "--retrieval_budget": wanted.retrieval,
        "--estimation_budget": wanted.estimation,
        "--cache_ratio": ratio,
    }
    if not wanted.full:
        _account_common(ledger)
        _express_parameters(ledger, "buffer_clusters")
        if _account_fixed(ledger, policy, "generate_config()"):
            ledger.express("context_length.min", "context_length.max")
        else:
            _decline_other_lengths(ledger)
        ledger.express("cache.fraction")
    return _files(ledger, wanted, config, arguments, V1_MODELS, "--gpu_only" if gpu_only else "")


def write_v0(ledger: Ledger) -> Mapping[str, str]:
    """v0: the JSON holds counts; ``benchmark/config.py`` recomputes them from two ratios."""
    wanted = _wanted(ledger)
    policy = wanted.policy
    estimation = min(wanted.estimation, 1.0 - wanted.retrieval)
    counts = formulas.v0_counts(
        wanted.context,
        wanted.retrieval,
        estimation,
        tokens_per_centroid=policy.tokens_per_centroid,
        segment_tokens=policy.segment,
    )
    cache_clusters = counts.cache_cluster_num
    if wanted.fraction is not None:
        pages = formulas.v0_pages_per_cluster(wanted.context, counts.n_centroids, policy.sink + policy.local)
        cache_clusters = max(1, round(wanted.fraction * wanted.context / (PAGE_TOKENS * pages)))
    config = {
        "static_pattern_start": policy.sink,
        "static_pattern_end": policy.local,
        "core": _cores(ledger),
        "n_centroids": counts.n_centroids,
        "n_segment": counts.n_segment,
        "nprobe": counts.nprobe,
        "max_compute_cluster_num": min(counts.max_compute_cluster_num, counts.n_centroids),
        "cache_unit_size": PAGE_TOKENS,
        "cache_cluster_num": cache_clusters,
    }
    arguments = {"--budget_ratio": wanted.retrieval, "--estimate_ratio": estimation}
    if not wanted.full:
        _account_common(ledger)
        _account_fixed(ledger, policy, "benchmark/config.py")
        ledger.decline("policy.parameters.buffer_clusters", "v0's buffer always holds 4 × nprobe clusters")
        ledger.decline(
            "cache.fraction",
            f"benchmark/config.py resets cache_cluster_num to 3 × nprobe; {DIRECT}",
        )
        _decline_other_lengths(ledger)
    return _files(ledger, wanted, config, arguments, MODELS, "")


V0 = Exporter(
    engine="retroinfer",
    engine_version="v0",
    title="RetroInfer v0",
    write=write_v0,
    usage="copy {folder}/config into the RetroInfer checkout; give its benchmarks the words of {model}.args",
    policies=("wave_index", DENSE),
)
V1 = Exporter(
    engine="retroinfer",
    engine_version="v1",
    title="RetroInfer v1",
    write=write_v1,
    usage="copy {folder}/config into the RetroInfer checkout; there: "
    "python simple_test.py $(cat config/{model}.args)",
    policies=("wave_index", DENSE),
)


def _wanted(ledger: Ledger) -> Wanted:
    resolved = ledger.resolved
    full = resolved.policy == DENSE
    cache = ledger.profile.cache
    return Wanted(
        policy=WaveIndex() if full else WaveIndex.from_parameters(resolved.parameters),
        context=resolved.context_length,
        full=full,
        fraction=None if full or cache is None else cache.fraction,
    )


def _files(
    ledger: Ledger,
    wanted: Wanted,
    config: Mapping[str, object],
    arguments: Mapping[str, float],
    models: tuple[str, ...],
    flag: str,
) -> dict[str, str]:
    """The JSON and the argument line; accounts for model, precision and full attention on the way."""
    words = ["--attn_type", "Full_Flash_Attn" if wanted.full else "RetroInfer"]
    words += _model_words(ledger, models) + _dtype_words(ledger)
    if wanted.full:
        ledger.express("policy.name", "dense_layers", "context_length.min", "context_length.max")
        ledger.decline("cache", "its full attention keeps all keys and values on the GPU")
    else:
        words += [word for name, value in arguments.items() for word in (name, repr(float(value)))]
        words += [flag] if flag else []
    stem = f"config/{ledger.profile.model.basename}"
    return {f"{stem}.json": as_json({"RetroInfer": config}), f"{stem}.args": " ".join(words) + "\n"}


def _account_common(ledger: Ledger) -> None:
    ledger.express("policy.name")
    _express_parameters(ledger, "retrieval", "estimation", "estimate", "sink", "local")
    cache = ledger.profile.cache
    if cache is not None and cache.policy == "wave":
        ledger.express("cache.policy")
    else:
        ledger.decline("cache.policy", "its wave buffer is the only cache")
    ledger.decline("overrides", "one setting serves all layers")
    ledger.decline("dense_layers", "every layer uses the index")


def _account_fixed(ledger: Ledger, policy: WaveIndex, overwriter: str) -> bool:
    """Cluster and segment size, which ``overwriter`` resets; whether the profile agrees with it."""
    fixed = {
        "tokens_per_centroid": (policy.tokens_per_centroid, formulas.TOKENS_PER_CENTROID),
        "segment": (policy.segment, formulas.SEGMENT_TOKENS),
    }
    for name, (value, engine_value) in fixed.items():
        if value == engine_value:
            _express_parameters(ledger, name)
        else:
            ledger.decline(
                f"policy.parameters.{name}",
                f"{overwriter} resets it to {engine_value}; {DIRECT}",
            )
    return all(value == engine_value for value, engine_value in fixed.values())


def _decline_other_lengths(ledger: Ledger) -> None:
    """Counts that are right at one length only: the tuned range is expressed where it is that length."""
    length = ledger.resolved.context_length
    for name in ("min", "max"):
        if getattr(ledger.profile.context_length, name) == length:
            ledger.express(f"context_length.{name}")
        else:
            ledger.decline(
                f"context_length.{name}", f"the JSON's counts are for {length} tokens: export every length"
            )


def _express_parameters(ledger: Ledger, *names: str) -> None:
    ledger.express(*(f"policy.parameters.{name}" for name in names))


def _buffer_clusters(wanted: Wanted) -> int:
    """The buffer's clusters before the engine's own 4 × nprobe (it sets 150 itself on short contexts)."""
    short = wanted.context <= formulas.SHORT_CONTEXT
    return formulas.SHORT_BUFFER_CLUSTERS if short else wanted.policy.buffer_clusters


def _model_words(ledger: Ledger, models: tuple[str, ...]) -> list[str]:
    model = ledger.profile.model
    ledger.decline("model.rope", "it takes the rope from the model's config.json: change it there")
    if model.id in models:
        ledger.express("model.id")
        return ["--model_name", model.id]
    if any(family in model.id for family in FAMILIES):
        ledger.decline("model.id", "its scripts' --model_name does not offer it; load_model() takes it")
    else:
        ledger.decline("model.id", f"it has model code for {' and '.join(FAMILIES)} only")
    return []


def _dtype_words(ledger: Ledger) -> list[str]:
    precision = ledger.profile.kv_precision
    dtype = ledger.profile.geometry.dtype
    for name in ("keys", "values"):
        if getattr(precision, name) != "native":
            ledger.decline(f"kv_precision.{name}", "it stores keys and values at the model's precision")
        elif dtype not in DTYPES:
            ledger.decline(f"kv_precision.{name}", f"it runs in bf16 or fp16, the trace in {dtype}")
        else:
            ledger.express(f"kv_precision.{name}")
    return ["--dtype", DTYPES[dtype]] if dtype in DTYPES else []


def _cores(ledger: Ledger) -> int:
    """Threads of the wave buffer: two less than the machine has, or the number shipped."""
    hardware = ledger.profile.hardware
    if hardware is None or hardware.cores is None:
        return SHIPPED_CORES
    return max(hardware.cores - 2, 1)
