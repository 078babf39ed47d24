"""Quality live on a real model: methods at equal read bytes, a tuned profile, and the same turn after turn.

For each task, captures a trace, matches every method's read bytes to RetroInfer's defaults on it (as
``kvtune analyze --compare`` does) and decodes the traced conversations live under each. With
``--profile``, the profile and RetroInfer's defaults decode fresh samples. Then five questions over one
context are asked turn by turn under the wave index and StreamingLLM at about the same bytes. All documents
are kept in ``results/<name>_documents.json``.

Run: ``PYTHONPATH=. python benchmarks/quality.py MODEL --context 6144 --profile profile.yaml``.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import record as recording

import kvtune
from kvtune.analysis.compare import compare
from kvtune.capturing import capture
from kvtune.models import LoadedModel, Rope, load_model
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.profiles import load_profile
from kvtune.profiles.checks import plan_of
from kvtune.runtime.traced import TracedRuns
from kvtune.workloads import get_workload

METHODS = ["wave_index", "quest", "ctkvr", "streaming", "snapkv"]
PEER = "RetroInfer defaults"
TURNS = {
    "wave_index": ("wave_index", {"retrieval": 0.05}),
    "streaming": ("streaming", {"recent": 300}),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rope", help="like yarn:4")
    parser.add_argument("--tasks", default="code_search,niah_single")
    parser.add_argument("--context", type=int, default=6144)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--decode", type=int, default=48)
    parser.add_argument("--match-layers", help="layers whose bytes are matched, like 3,9,15 (default: all)")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--turn-context", type=int, default=2500, help="0: no turns")
    parser.add_argument("--turn-samples", type=int, default=8)
    parser.add_argument("--name", default="quality")
    options = parser.parse_args()
    if out := os.environ.get("OUT"):
        recording.RESULTS = Path(out)
    loaded = load_model(options.model, rope=Rope(options.rope))
    documents: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for task in options.tasks.split(","):
        documents[task] = compared(loaded, task, options)
        rows += method_rows(task, documents[task], options)
        keep(documents, rows, options.name)
    if options.profile:
        documents["profile"] = profiled(loaded, options)
        rows += profile_rows(documents["profile"], options)
        keep(documents, rows, options.name)
    if options.turn_context:
        documents["turns"] = by_turn(loaded, options)
        rows += turn_rows(documents["turns"], options)
        keep(documents, rows, options.name)
    print(recording.table(rows))


def compared(loaded: LoadedModel, task: str, options: argparse.Namespace) -> dict[str, Any]:
    """The comparison of one task, with the live figures of each method."""
    layers = [int(n) for n in options.match_layers.split(",")] if options.match_layers else None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        capture(
            loaded,
            task,
            path,
            context=options.context,
            samples=options.samples,
            decode=options.decode,
            prompt_queries=1024,
        )
        trace = kvtune.open_trace(path)
        return compare(trace, METHODS, layers=layers, device="auto", live=TracedRuns(trace, options.samples))


def profiled(loaded: LoadedModel, options: argparse.Namespace) -> dict[str, Any]:
    """The profile and RetroInfer's defaults on fresh samples of the profile's first task."""
    profile = load_profile(options.profile)
    resolved = profile.resolve(options.context)
    workload = get_workload(options.tasks.split(",")[0])
    samples = list(workload.samples(loaded.tokenizer, options.context, 2 * options.samples, 1, 1, 1000))
    plans = {"tuned profile": plan_of(resolved), PEER: Plan(get_policy("wave_index"))}
    return {
        name: kvtune.live(loaded, samples, plan, decode=options.decode, free=False)
        for name, plan in plans.items()
    }


def by_turn(loaded: LoadedModel, options: argparse.Namespace) -> dict[str, Any]:
    workload = get_workload("niah_multiquery")
    samples = list(workload.samples(loaded.tokenizer, options.turn_context, options.turn_samples, 5, 1, 7))
    return {
        name: kvtune.live(loaded, samples, get_policy(*policy), decode=32, workload=workload)
        for name, policy in TURNS.items()
    }


def method_rows(task: str, document: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    base = next((row for row in document["policies"] if row["name"] == "wave_index"), {})
    for row in document["policies"]:
        if "kl" not in row:
            continue
        rows.append(
            {"name": f"live_kl_{row['name']}", "value": row["kl"]["mean"], "unit": "nats", "peer": PEER,
             "peer_value": base["kl"]["mean"], "ratio": row["kl"]["mean"] / base["kl"]["mean"], "task": task,
             "context": options.context, "delta_nll": row["delta_nll"], "top1": row["top1"],
             "output_error": row["output_error"], "read_bytes_per_step": row["read_bytes_per_step"],
             "params": row["params"]}
        )  # fmt: skip
    return rows


def profile_rows(documents: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    tuned, base = documents["tuned profile"], documents[PEER]
    return [
        {"name": "live_kl_tuned_profile", "value": tuned["kl"]["mean"], "unit": "nats", "peer": PEER,
         "peer_value": base["kl"]["mean"], "ratio": tuned["kl"]["mean"] / base["kl"]["mean"],
         "context": options.context, "answers": tuned["answers"], "delta_nll": tuned["delta_nll"],
         "peer_delta_nll": base["delta_nll"], "hit_ratio": tuned["hit_ratio"]}
    ]  # fmt: skip


def turn_rows(documents: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, document in documents.items():
        for turn in document["per_turn"]:
            rows.append(
                {"name": f"turn_{turn['turn']}_{name}", "value": turn["kl"]["mean"], "unit": "nats",
                 "peer": None, "peer_value": None, "ratio": None, "delta_nll": turn["delta_nll"],
                 "score": turn["score"], "context": options.turn_context}
            )  # fmt: skip
    return rows


def keep(documents: dict[str, Any], rows: list[dict[str, Any]], name: str) -> None:
    path = recording.RESULTS / f"{name}_documents.json"
    path.write_text(json.dumps(documents, indent=1, default=str), encoding="utf-8")
    recording.record(rows, name)


if __name__ == "__main__":
    main()
