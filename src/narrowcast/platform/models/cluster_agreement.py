"""Agreement of clusters with known classes, which do not depend on the numbers of the clusters."""

from __future__ import annotations

import numpy as np

from narrowcast.platform.types import IntArray


def _table(clusters: IntArray, labels: IntArray) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    counts = np.zeros((int(clusters.max()) + 1, int(labels.max()) + 1))
    np.add.at(counts, (clusters, labels), 1)
    return counts


def accuracy_of_clusters(clusters: IntArray, labels: IntArray) -> float:
    """Return the share of samples in the class of their cluster, under the best one-to-one assignment of both."""
    from scipy.optimize import linear_sum_assignment  # takes a tenth of a second

    counts = _table(clusters, labels)
    rows, columns = linear_sum_assignment(counts, maximize=True)
    return float(counts[rows, columns].sum() / len(labels))


def mutual_information(clusters: IntArray, labels: IntArray) -> float:
    """Return the mutual information of clusters and classes over the mean of their entropies, 0 to 1.

    As scikit-learn's `normalized_mutual_info_score`: 1 if both are one cluster.
    """
    joint = _table(clusters, labels) / len(labels)
    rows, columns = joint.sum(axis=1), joint.sum(axis=0)
    entropies = _entropy(rows) + _entropy(columns)
    return float(2 - 2 * _entropy(joint.ravel()) / entropies) if entropies else 1.0


def _entropy(shares: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    some = shares[shares > 0]
    return float(-(some * np.log(some)).sum())
