"""CTkvr option ``centroids=offline``: centroids learned from the queries of other traces, kept in a file."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvtune.errors import InputError
from kvtune.geometry import LayerInfo
from kvtune.policies.ctkvr_centroids import kmeans_centroids


def learn_centroids(queries: Sequence[Tensor], count: int) -> Tensor:
    """k-means over the queries of one layer in several traces.

    [H, G, W, d] each (as ``build`` gets them) → [H, ≤ count, G, d] float32. Raises ``InputError`` where there
    are none, or of different shapes.
    """
    shapes = {(rows.shape[0], rows.shape[1], rows.shape[3]) for rows in queries}
    if len(shapes) != 1:
        raise InputError(f"queries of one layer are needed to learn centroids, not of {len(shapes)} shapes")
    together = torch.cat([rows.float() for rows in queries], 2)
    if not together.shape[2] or count < 1:
        raise InputError("learning centroids needs at least one query and one centroid")
    return kmeans_centroids(together.transpose(1, 2), count)


def save_centroids(path: str | Path, layers: Mapping[int, Tensor]) -> Path:
    """Write the centroids [H, C, G, d] of each layer to one ``.npz`` file, whole or not at all."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    arrays = {f"layer_{number}": rows.float().cpu().numpy() for number, rows in layers.items()}
    with temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def load_centroids(path: str | Path, layer: LayerInfo) -> Tensor:
    """The centroids [H, C, G, d] float32 of ``layer``; ``InputError`` where the file does not have them."""
    name = f"layer_{layer.layer}"
    try:
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as arrays:
            if name not in arrays.files:
                raise InputError(f"{path} has no centroids for layer {layer.layer}")
            rows = arrays[name]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"no centroids can be read from {path}: {error}") from None
    group, dim = layer.group, layer.head_dim
    if rows.ndim != 4 or rows.shape[2:] != (group, dim) or not np.issubdtype(rows.dtype, np.floating):
        raise InputError(f"{path}: layer {layer.layer} needs centroids of shape [heads, C, {group}, {dim}]")
    if not np.isfinite(rows).all():
        raise InputError(f"{path}: the centroids of layer {layer.layer} are not all finite")
    return torch.from_numpy(rows.astype(np.float32))
