"""A tuning trial whose layer evaluations are cached against the same trial cold.

Cold: references, indexes and evaluations are all made. Same index: only the budgets changed, so indexes and
references are reused. Cached: only the cache fraction changed, so evaluations are reused too and the wave
buffer is simulated anew. Run: ``python benchmarks/tuning_trial.py TRACE``.
"""

from __future__ import annotations

import argparse
import statistics
import time

import record as recording

from kvtune import open_trace
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.tuning import Bench

REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace")
    parser.add_argument("--samples", type=int, default=1)
    options = parser.parse_args()
    trace = open_trace(options.trace)
    samples = range(min(options.samples, trace.n_samples))
    default = Plan(get_policy("wave_index"))
    wider = Plan(get_policy("wave_index", {"retrieval": 0.03, "estimation": 0.3}))

    Bench(trace, samples, trace.layers[:1]).score(default, 0.05)  # compiles what is compiled once
    runs = []
    for repeat in range(REPEATS):
        bench = Bench(trace, samples, trace.layers)
        candidates = ((default, 0.05), (wider, 0.05), (default, 0.06 + repeat / 100))
        runs.append([seconds(bench, plan, fraction) for plan, fraction in candidates])
    cold, same_index, cached = zip(*runs)
    about = {
        "layers": len(trace.layers),
        "timelines": len(bench.timelines),
        "context": bench.context_tokens[1],
    }
    rows = [
        {
            "name": name,
            "value": 1000 * statistics.median(times),
            "unit": "ms",
            "peer": "the same trial cold",
            "peer_value": 1000 * statistics.median(cold),
            "ratio": statistics.median(cold) / statistics.median(times),
            **about,
        }
        for name, times in (("tuning_trial_cached", cached), ("tuning_trial_same_index", same_index))
    ]
    print(recording.table(rows))
    print(f"wrote {recording.record(rows, 'tuning_trial')}")


def seconds(bench: Bench, plan: Plan, fraction: float) -> float:
    started = time.perf_counter()
    bench.score(plan, fraction)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
