"""Segmented k-means of one layer on a GPU: checks, a sweep of launch shapes, and the peers in the same run.

One layer is 8 kv heads of 131,072 bf16 keys of dimension 128, 512 centroids per segment of 8,192, 9 local
iterations and 1 global pass. Peers: plain batched torch; RetroInfer's own Triton kernel, given the path of
its ``cache_hub/kmeans.py`` with ``--peer``; Faiss on GPU, one call a segment, with ``--faiss``. Keys are
not centred, because the peer leaves that to its caller; the centred build is a row of its own.

Run from the repository root: ``PYTHONPATH=. python benchmarks/kmeans_gpu.py --peer kmeans.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import record as recording
import torch
from gpu_clock import graphed, milliseconds
from torch import Tensor

from kvtune.clustering import backends, members, segmented_kmeans, torch_kmeans, triton_kmeans
from kvtune.clustering.triton_kmeans import Means, NarrowKeys, Problems, Tiles, WideKeys

HEADS, TOKENS, DIM, SEGMENTS, CENTROIDS, ITERATIONS = 8, 131072, 128, 16, 8192, 10
LOCAL_FLOP = 2.0 * HEADS * TOKENS * (CENTROIDS // SEGMENTS) * DIM
GLOBAL_FLOP = 2.0 * HEADS * TOKENS * CENTROIDS * DIM
SHAPES = [
    Tiles(128, 64, 4, 3), Tiles(128, 64, 4, 4), Tiles(128, 64, 4, 5), Tiles(64, 64, 4, 4),
    Tiles(64, 128, 4, 3), Tiles(128, 128, 8, 3),
]  # fmt: skip
MEANS = [Means(1, 16, 1), Means(2, 8, 1), Means(4, 4, 1), Means(4, 8, 1), Means(8, 4, 1), Means(8, 8, 1),
         Means(8, 4, 4)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=Path, help="RetroInfer's cache_hub/kmeans.py")
    parser.add_argument("--faiss", action="store_true", help="also time Faiss on GPU (a few seconds a call)")
    parser.add_argument("--no-sweep", action="store_true")
    options = parser.parse_args()
    peer = _load(options.peer) if options.peer else None

    check()
    keys = gaussian_keys()
    ceilings(keys)
    if not options.no_sweep:
        sweep(keys)
    components(keys)
    rows = layer_rows(keys, peer, options.faiss)
    if out := os.environ.get("OUT"):
        recording.RESULTS = Path(out)
    path = recording.record(rows, "kmeans_gpu")
    print(recording.table(rows))
    print(f"wrote {path}")


# Checks


def check() -> None:
    """Small cases against float64 and the CPU backend; memory not written reads as NaN or a huge index."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    for dtype, n, n_centroids, n_segments, dim in [
        (torch.bfloat16, 8192, 512, 1, 128),
        (torch.bfloat16, 16384, 1024, 2, 128),
        (torch.bfloat16, 16384, 512, 4, 64),
        (torch.bfloat16, 5001, 312, 4, 128),
        (torch.float16, 3000, 180, 3, 64),
        (torch.float32, 2500, 150, 2, 96),
        (torch.bfloat16, 2100, 130, 1, 256),
        (torch.float32, 2100, 130, 1, 256),
        (torch.bfloat16, 70, 8, 4, 80),
    ]:
        keys = (torch.randn(2, n, dim, device="cuda") + torch.randn(dim, device="cuda")).to(dtype)
        mean = keys.float().mean(1, keepdim=True)
        centroids = torch.nn.functional.normalize(torch.randn(2, n_centroids, dim, device="cuda"), dim=-1)
        centred = keys.double() - mean.double()
        scores = torch.bmm(centred, centroids.double().transpose(1, 2))
        chosen = scores.gather(2, triton_kmeans.assign(keys, mean, centroids)[..., None])[..., 0]
        lost = ((scores.amax(2) - chosen) / centred.norm(dim=2)).max().item()
        got = segmented_kmeans(keys, n_centroids, n_segments)
        want = segmented_kmeans(keys.cpu(), n_centroids, n_segments)
        tightness = inertia(keys, got.assignment, n_centroids) / inertia(
            keys, want.assignment.cuda(), n_centroids
        )
        print(
            f"check {dtype!s:15} N={n} C={n_centroids} S={n_segments} d={dim}: "
            f"score lost {lost:.1e}, inertia {tightness:.5f} of the CPU's"
        )
        assert lost < 5e-3 and abs(tightness - 1) < 1e-2, "assignment is wrong"
        check_sums(keys, got.assignment, got.sizes)
    torch.use_deterministic_algorithms(False)
    same = torch.full((1, 512, 128), 1.5, device="cuda", dtype=torch.bfloat16)
    assert segmented_kmeans(same, 32, 2).sizes[0, 0] == 512, "identical keys are torn apart"


def check_sums(values: Tensor, assignment: Tensor, sizes: Tensor) -> None:
    got = triton_kmeans.cluster_sums(values, assignment, sizes)
    want = torch.zeros(got.shape, dtype=torch.float64, device="cuda")
    want.scatter_add_(1, assignment[..., None].expand(values.shape), values.double())
    error = ((got - want).norm() / want.norm()).item()
    assert error < 1e-5, f"cluster sums are off by {error}"
    order, offsets = members(assignment, sizes)
    assert torch.equal(offsets[:, -1], sizes.sum(1)) and torch.equal(
        order.sort(1).values[0].cpu(), torch.arange(values.shape[1])
    )


def inertia(keys: Tensor, assignment: Tensor, n_centroids: int) -> float:
    """Sum of squared distances to the exact means of an assignment, in float64, head by head."""
    total = 0.0
    for head, mine in zip(keys, assignment):
        head = head.double()
        sums = torch.zeros(n_centroids, head.shape[1], dtype=torch.float64, device=keys.device)
        sums.index_add_(0, mine, head)
        sizes = torch.bincount(mine, minlength=n_centroids).clamp(min=1)
        total += float(head.square().sum() - (sums.square().sum(1) / sizes).sum())
    return total


# Data and clock


def gaussian_keys() -> Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randn(HEADS, TOKENS, DIM, generator=generator, device="cuda").bfloat16()


def drifting_keys() -> Tensor:
    """Keys around a few hundred directions of very uneven popularity: clusters of uneven size."""
    generator = torch.Generator("cuda").manual_seed(1)
    directions = 4 * torch.randn(HEADS, 300, DIM, generator=generator, device="cuda") / DIM**0.25
    popular = torch.rand(HEADS, TOKENS, generator=generator, device="cuda").pow(3).mul(300).long()
    own = directions.gather(1, popular[..., None].expand(-1, -1, DIM))
    return (own + torch.randn(HEADS, TOKENS, DIM, generator=generator, device="cuda")).bfloat16()


def ceilings(keys: Tensor) -> None:
    a, b = torch.randn(2, 8192, 8192, device="cuda").bfloat16()
    product = milliseconds(lambda: a @ b)
    target = torch.empty_like(keys)
    copy = milliseconds(lambda: target.copy_(keys))
    rate = 2 * 8192**3 / product / 1e9
    floor = ((ITERATIONS - 1) * LOCAL_FLOP + GLOBAL_FLOP) / rate / 1e9
    print(
        f"ceilings: matrix product {rate:.0f} TFLOP/s, copy {2 * keys.nbytes / copy / 1e9:.2f} TB/s; "
        f"arithmetic floor of 9 + 1: {floor:.2f} ms"
    )


# Parts of one build


def sweep(keys: Tensor) -> None:
    """Launch shapes of the assignment at 16 and 8 bits, within segments and over all centroids."""
    mean = torch.zeros(HEADS, 1, DIM, device="cuda")
    centroids = torch.nn.functional.normalize(keys[:, :: TOKENS // CENTROIDS].float(), dim=-1).bfloat16()
    local, whole = Problems(keys, mean, CENTROIDS, SEGMENTS), Problems(keys, mean, CENTROIDS, 1)
    wide, narrow = WideKeys(local, keys, centroids.contiguous()), NarrowKeys(local, keys)
    narrow.centroids.copy_((centroids.float() * narrow.gain).to(narrow.centroids.dtype))
    everywhere = WideKeys(whole, keys, wide.centroids)
    print("assignment, ms TFLOP/s:  local 16 bits   local 8 bits   global 16 bits")
    for tiles in SHAPES:
        label = f"  {tiles.keys:3d} x {tiles.centroids:3d}  {tiles.warps} warps  {tiles.stages} stages"
        cells = []
        for operands, flop in ((wide, LOCAL_FLOP), (narrow, LOCAL_FLOP), (everywhere, GLOBAL_FLOP)):
            try:
                operands.use(tiles)
                time = graphed(operands.assign)
                cells.append(f"{time:.3f} {flop / time / 1e9:4.0f}")
            except Exception as error:  # a shape too large for the chip must not end the sweep
                cells.append(f"{type(error).__name__} {str(error)[:40]}")
        print(f"{label}:  {'   '.join(cells)}", flush=True)
    wide.use(triton_kmeans.WIDE)
    local.sizes.zero_()
    wide.assign()
    sizes = local.sizes.clone()
    order = lambda: triton_kmeans.sort_by_cluster(local.assignment, local.ranks, local.sizes)  # noqa: E731
    print(f"sort by cluster {graphed(order):.3f} ms; sort and move, ms:  16 bits  8 bits")
    for means in MEANS:
        times = []
        for operands in (wide, narrow):

            def move(operands: Any = operands, means: Means = means) -> None:
                local.sizes.copy_(sizes)
                operands.move(operands, means)

            times.append(f"{graphed(move):.3f}")
        print(f"  {means}: {'  '.join(times)}", flush=True)


def components(keys: Tensor) -> None:
    """Where the time of one build goes."""
    mean = torch.zeros(HEADS, 1, DIM, device="cuda")
    start = keys[:, TOKENS // CENTROIDS // 2 :: TOKENS // CENTROIDS].float().contiguous()
    centroids = triton_kmeans.refine(keys, mean, start, SEGMENTS, ITERATIONS - 1)
    assignment = triton_kmeans.assign(keys, mean, centroids)
    sizes = torch.zeros(HEADS, CENTROIDS, dtype=torch.int64, device="cuda")
    sizes.scatter_add_(1, assignment, torch.ones_like(assignment))
    parts = {
        "9 local iterations": lambda: triton_kmeans.refine(keys, mean, start, SEGMENTS, ITERATIONS - 1),
        "of these, to 8 bits": lambda: NarrowKeys(Problems(keys, mean, CENTROIDS, SEGMENTS), keys),
        "global assignment": lambda: triton_kmeans.assign(keys, mean, centroids),
        "global sums": lambda: triton_kmeans.cluster_sums(keys, assignment, sizes),
        "sizes": lambda: torch.zeros_like(sizes).scatter_add_(1, assignment, torch.ones_like(assignment)),
        "mean of the keys": lambda: keys.mean(1, dtype=torch.float32),
        "member lists": lambda: members(assignment, sizes),
    }
    for name, body in parts.items():
        print(f"  {name:20} {milliseconds(body):.3f} ms")


# The whole layer against the peers


def layer_rows(keys: Tensor, peer: ModuleType | None, with_faiss: bool) -> list[dict[str, Any]]:
    for name, data in (("gaussian", keys), ("uneven", drifting_keys())):
        ours = segmented_kmeans(data, CENTROIDS, SEGMENTS, centre=False).assignment
        found = {"kvtune": ours, "torch": _torch_layer(data)}
        if peer:
            found["RetroInfer"] = _peer_layer(peer, data, ITERATIONS - 1, True)[1].long()
        base = inertia(data, found["kvtune"], CENTROIDS)
        for who, assignment in found.items():
            largest = max(int(torch.bincount(row).max()) for row in assignment)
            ratio = inertia(data, assignment, CENTROIDS) / base
            print(f"inertia, {name} keys, {who}: {ratio:.5f} of kvtune's; largest cluster {largest}")
        if name == "uneven":
            time = milliseconds(lambda data=data: segmented_kmeans(data, CENTROIDS, SEGMENTS, centre=False))
            print(f"uneven keys, 9 + 1: {time:.2f} ms", flush=True)

    whole = milliseconds(lambda: segmented_kmeans(keys, CENTROIDS, SEGMENTS, centre=False))
    centred = milliseconds(lambda: segmented_kmeans(keys, CENTROIDS, SEGMENTS))
    local = milliseconds(lambda: _local(triton_kmeans, keys))
    rows = [_row("kmeans_9plus1_centred_layer", centred, None, None)]
    rows.append(
        _row("kmeans_9plus1_layer", whole, "plain torch", milliseconds(lambda: _torch_layer(keys), repeats=3))
    )
    rows.append(
        _row(
            "kmeans_local_layer",
            local,
            "plain torch",
            milliseconds(lambda: _local(torch_kmeans, keys), repeats=3),
        )
    )
    if peer:
        named = "RetroInfer's kernel"
        rows += [
            _row(
                "kmeans_9plus1_layer",
                whole,
                named,
                milliseconds(lambda: _peer_layer(peer, keys, ITERATIONS - 1, True)),
            ),
            _row(
                "kmeans_local_layer",
                local,
                named,
                milliseconds(lambda: _peer_layer(peer, keys, ITERATIONS, False)),
            ),
        ]
    if with_faiss:
        rows.append(
            _row(
                "kmeans_local_layer",
                local,
                "Faiss GPU, per segment",
                milliseconds(lambda: _faiss_layer(keys), repeats=1),
            )
        )
    return rows


def _row(name: str, value: float, peer: str | None, peer_value: float | None) -> dict[str, Any]:
    ratio = peer_value / value if peer_value else None
    return {
        "name": name, "value": value, "unit": "ms", "peer": peer, "peer_value": peer_value, "ratio": ratio,
        "shape": [HEADS, TOKENS, DIM], "centroids": CENTROIDS, "segments": SEGMENTS,
    }  # fmt: skip


def _local(backend: backends.Backend, keys: Tensor) -> Tensor:
    """Ten iterations within segments."""
    mean = torch.zeros(HEADS, 1, DIM, device="cuda")
    start = keys[:, TOKENS // CENTROIDS // 2 :: TOKENS // CENTROIDS].float()
    return backend.refine(keys, mean, start, SEGMENTS, ITERATIONS)


def _torch_layer(keys: Tensor) -> Tensor:
    mean = torch.zeros(HEADS, 1, DIM, device="cuda")
    start = keys[:, TOKENS // CENTROIDS // 2 :: TOKENS // CENTROIDS].float()
    centroids = torch_kmeans.refine(keys, mean, start, SEGMENTS, ITERATIONS - 1)
    assignment = torch_kmeans.assign(keys, mean, centroids)
    torch_kmeans.cluster_sums(keys, assignment, torch.empty(HEADS, CENTROIDS))
    return assignment


def _peer_layer(peer: ModuleType, keys: Tensor, local: int, global_pass: bool) -> Any:
    """The peer's passes in the order of its own driver, without its value sums and member lists."""
    centroids = keys[:, TOKENS // CENTROIDS // 2 :: TOKENS // CENTROIDS].contiguous()
    centroids = centroids.view(HEADS * SEGMENTS, -1, DIM)
    data = keys.view(HEADS * SEGMENTS, -1, DIM)
    chosen = torch.empty(data.shape[:2], dtype=torch.int32, device="cuda")
    for _ in range(local):
        centroids = peer._triton_k_means_train(data, centroids, max_idx=chosen, normalize_centroids=True)
    if not global_pass:
        return centroids, chosen
    return peer._triton_k_means_train(
        keys, centroids.view(HEADS, -1, DIM), normalize_centroids=False, return_indices=True
    )


def _faiss_layer(keys: Tensor) -> None:
    import faiss

    for segment in keys.view(HEADS * SEGMENTS, -1, DIM).float().cpu():
        kmeans = faiss.Kmeans(
            DIM,
            CENTROIDS // SEGMENTS,
            niter=ITERATIONS,
            spherical=True,
            gpu=1,
            max_points_per_centroid=len(segment),
            min_points_per_centroid=1,
        )
        kmeans.train(segment.numpy(), init_centroids=segment[8::16].numpy())


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_kmeans", path)
    assert spec and spec.loader, f"{path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
