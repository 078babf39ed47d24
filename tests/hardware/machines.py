"""A machine of round numbers, a small geometry, and traffic for them."""

from __future__ import annotations

from typing import Any

from kvtune.geometry import ModelGeometry
from kvtune.hardware import Hardware, LayerTraffic, parse_hardware

PLAIN: dict[str, Any] = {
    "kvtune_hardware": 1,
    "name": "plain",
    "device": "A GPU of round numbers",
    "source": {"kind": "data sheet", "document": "this file"},
    "device_memory": {
        "bytes": 10 * 2**30,
        "read_bytes_per_second": 1e12,
        "copy_bytes_per_second": 8e11,
        "gather": [
            {"row_bytes": 32, "bytes_per_second": 2.5e11},
            {"row_bytes": 256, "bytes_per_second": 5e11},
        ],
    },
    "host_to_device": {
        "pinned": [
            {"bytes": 1000, "bytes_per_second": 1e9},
            {"bytes": 1_000_000, "bytes_per_second": 1e10},
            {"bytes": 100_000_000, "bytes_per_second": 2e10},
        ]
    },
    "launch": {"kernel_us": 5.0, "graph_node_us": 2.0, "layer_overhead_us": 10.0, "step_overhead_us": 30.0},
    "matmul_flops_per_second": 1e14,
}
STAGES: dict[str, Any] = {
    "scan": {"fixed_us": 3.0, "bytes_per_second": 5e11},
    "choose": {"fixed_us": 4.0, "ns_per_entry": 1.5},
    "attend": {"fixed_us": 6.0, "bytes_per_second": 2e11},
    "fetch": {"fixed_us": 7.0, "bytes_per_second": 4e10},
    "full": {"fixed_us": 1.0, "bytes_per_second": 9e11},
}

GEOMETRY = ModelGeometry(
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    value_dim=16,
    dtype="bfloat16",
    max_positions=65536,
    scaling=0.25,
    windows=(None, None, 128),
    softcaps=(None,) * 3,
    sinks=(False,) * 3,
)
SPARSE = LayerTraffic(
    scan_bytes=6_400_000.0,
    estimation_bytes=1_200_000.0,
    exact_bytes=2_560_000.0,
    missed_bytes=3_000_000.0,
    blocks=300.0,
)
DENSE = LayerTraffic(exact_bytes=50_000.0, dense=True)
TRAFFIC = (SPARSE, SPARSE, DENSE)


def machine(**changes: Any) -> Hardware:
    """The plain machine with some of its keys replaced."""
    return parse_hardware({**PLAIN, **changes})
