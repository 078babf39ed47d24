"""Quality at equal read bytes: the tuned profile against RetroInfer's shipped defaults, on samples held out.

Captures each task, tunes on most samples and compares on the others; then decodes live, on fresh samples,
under the profile and under the defaults. Every command's JSON document is kept beside the rows.

Run: ``python benchmarks/held_out.py MODEL --context 6144 --samples 8 --trials 40``; beyond a model's own
length with ``--rope yarn:4``; on a GPU with ``--device cuda``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record as recording

PEER = "RetroInfer defaults"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tasks", default="code_search,niah_single")
    parser.add_argument("--context", type=int, default=6144)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--live-samples", type=int, default=8)
    parser.add_argument("--rope", help="as kvtune capture takes it, like yarn:4")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--name", default="held_out")
    options = parser.parse_args()
    if out := os.environ.get("OUT"):
        recording.RESULTS = Path(out)
    rows: list[dict[str, Any]] = []
    documents: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for task in options.tasks.split(","):
            documents[task] = {}
            for step, arguments in steps(task, options, Path(folder)):
                documents[task][step] = kvtune(*arguments)
                keep(documents, options.name)
            rows += task_rows(task, documents[task], options)
    path = recording.record(rows, options.name)
    print(recording.table(rows))
    print(f"wrote {path}")


def steps(task: str, options: argparse.Namespace, folder: Path) -> list[tuple[str, list[str]]]:
    """The command lines of one task: capture, tune, two live runs, then what else the trace says."""
    trace, study = str(folder / f"{task}.trace"), folder / f"{task}.study"
    device = ["--device", options.device]
    workload = ["--task", task, "--context", str(options.context), "--decode", str(options.decode)]
    workload += [*device, "--dtype", options.dtype, *(["--rope", options.rope] if options.rope else [])]
    captured = ["--samples", str(options.samples), "--prompt-queries", "64", "--out", trace]
    fresh = [*workload, "--samples", str(options.live_samples), "--seed", "1000"]
    profile = str(study / "profile.yaml")
    return [
        ("capture", ["capture", options.model, *workload, *captured]),
        ("tune", ["tune", trace, "--trials", str(options.trials), *device, "--out", str(study)]),
        ("live_profile", ["live", options.model, *fresh, "--profile", profile]),
        ("live_default", ["live", options.model, *fresh, "--policy", "wave_index"]),
        ("simulate", ["simulate", trace, "--budgets", "0.01,0.02,0.05,0.1,0.15,0.2"]),
        ("analyze", ["analyze", trace, *device, "--out", str(folder / f"{task}.analysis")]),
    ]


def keep(documents: dict[str, Any], name: str) -> None:
    """Save what is known so far: a later step may fail or run out of time."""
    recording.RESULTS.mkdir(exist_ok=True)
    (recording.RESULTS / f"{name}_documents.json").write_text(json.dumps(documents, indent=1))


def kvtune(*arguments: str) -> dict[str, Any]:
    """One command's JSON document, with its seconds."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", "from kvtune.commands.app import main; main()", *arguments, "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    print(f"{seconds:7.1f} s  kvtune {' '.join(arguments)}", flush=True)
    if done.returncode:
        raise SystemExit(f"kvtune {arguments[0]} failed ({done.returncode}): {done.stderr[-3000:]}")
    return {**json.loads(done.stdout), "wall_seconds": seconds}


def task_rows(task: str, found: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Ratios below 1 mean that the tuned profile is better (or cheaper)."""
    held = found["tune"]["held_out"]
    chosen, default = held["chosen"], held["default"]
    pairs = [
        (
            "output_error_mean",
            chosen["output_error"]["mean"],
            default["output_error"]["mean"],
            "relative error",
        ),
        ("output_error_p95", chosen["output_error"]["p95"], default["output_error"]["p95"], "relative error"),
        ("read_bytes_per_step", chosen["read_bytes_per_step"], default["read_bytes_per_step"], "bytes"),
        ("live_kl", found["live_profile"]["kl"]["mean"], found["live_default"]["kl"]["mean"], "nats"),
    ]
    about = {"task": task, "context": options.context, "samples": options.samples, "winner": held["winner"]}
    return [
        {
            "name": f"held_out_{name}_{task}",
            "value": value,
            "unit": unit,
            "peer": PEER,
            "peer_value": peer,
            "ratio": value / peer if peer else None,
            **about,
        }
        for name, value, peer, unit in pairs
    ]


if __name__ == "__main__":
    main()
