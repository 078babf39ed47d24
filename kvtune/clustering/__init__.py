"""Clustering of keys: the segmented spherical k-means under the wave index."""

from __future__ import annotations

from kvtune.clustering.grouping import cluster_sums, members
from kvtune.clustering.kmeans import Clustering, segmented_kmeans

__all__ = ["Clustering", "cluster_sums", "members", "segmented_kmeans"]
