"""Clustering by FedMAvg: images of one class a client, factorised with non-negative factors, beside k-means.

Reference: Wang, Suwandi and Chang, ICASSP 2021, which applies the method to clustering and has figures of it. A column
belongs to the cluster of the largest of its ten factors. With `crossing` the products of different factors of a column
cost, so that columns have nearly one factor, as clusters do; both values tried are shown.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.platform.data.rating_matrix import SampleColumns
from narrowcast.platform.models.factorisation import accuracy_of_clusters, mutual_information
from narrowcast.platform.tracking.figures import BLUE, VERMILLION, new_figure
from narrowcast.runs.significance import compare_paired
from narrowcast.studies.comparison import ComparisonVerdicts, Tested, draw_seed_means
from narrowcast.studies.spec import RunSpec
from narrowcast.studies.verdicts import PaperVerdict, mean_and_spread

DATA = ("digits", "mnist")
CLUSTERS_OF_SET, RESTARTS = 10, 10


def k_means(spec: RunSpec, seed: int, *, test: bool = True) -> dict[str, Any]:
    """Return the accuracy and the normalised mutual information of k-means on the images of a seed, all in one place.

    The best of `RESTARTS` starts by its own objective (scikit-learn's Lloyd iterations from k-means++).
    """
    from sklearn.cluster import KMeans  # takes a second

    assert test, "nothing is tuned"
    began, source = time.perf_counter(), spec.configured(seed, spec.label).data_source
    assert isinstance(source, SampleColumns)
    matrix = SampleColumns.model_validate({"set": source.set, "columns": source.columns, "seed": seed}).load()
    columns = matrix.values.reshape(matrix.n_users, matrix.n_items)
    found = KMeans(CLUSTERS_OF_SET, n_init=RESTARTS, random_state=seed).fit_predict(columns).astype(np.int64)
    assert matrix.labels is not None
    accuracy, information = accuracy_of_clusters(found, matrix.labels), mutual_information(found, matrix.labels)
    return {
        "rounds": 0,
        "final": {"test.accuracy": accuracy, "test.nmi": information},
        **dict.fromkeys(("uplink_bits", "downlink_bits"), 0),
        "wall_seconds": round(time.perf_counter() - began, 2),
    }


def judge_clusters(tested: Tested) -> list[PaperVerdict]:
    """Give the accuracy and mutual information of every cell, and the difference from k-means on the same images."""
    verdicts = []
    for (data, *_), found in tested.items():
        central = tested.get((data, "k-means", "0"))
        ours = mean_and_spread(found.reached(), 1)
        said, difference = f"mutual information {mean_and_spread(found.reached('nmi'), 1)}", ""
        if central is not None and central is not found:
            interval = compare_paired(found.reached(), central.reached()).interval
            said += f", against k-means {interval.low:+.1f} to {interval.high:+.1f}"
            difference = f"{interval.mean:+.1f}"
        verdicts.append(PaperVerdict(found.cell.name, "", ours, said, difference, found.reached()))
    return verdicts


def plot_clusters(tested: Tested, path: Path) -> None:
    """Plot the accuracy of every cell and of k-means."""
    figure, panels = new_figure("Clusters against classes: FedMAvg with non-negative factors, and k-means", panels=2)
    for axes, data in zip(panels, DATA, strict=True):
        of_data = [found for key, found in tested.items() if key[0] == data]
        for place, found in enumerate(of_data):
            colour = VERMILLION if "k-means" in found.cell.name else BLUE
            draw_seed_means(axes, [place], [found.reached()], color=colour, marker="o", capsize=3)
        names = [found.cell.name.partition(", ")[2].replace(", ", ",\n") for found in of_data]
        axes.set_xticks(range(len(of_data)), names)
        axes.tick_params(axis="x", labelrotation=60, labelsize=7)
        axes.set(title=data, ylim=(0, 100))
    panels[0].set(ylabel="columns in the class of their cluster (%)")
    figure.savefig(path, dpi=150)


CLUSTERS = ComparisonVerdicts(judge_clusters, plot_clusters)
