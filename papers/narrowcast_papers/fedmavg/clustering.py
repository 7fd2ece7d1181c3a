"""Clustering by FedMAvg: images of one class a client, factorised with non-negative factors, beside k-means.

Reference: Wang, Suwandi and Chang, ICASSP 2021, which applies the method to clustering and has figures of it. A column
belongs to the cluster of the largest of its ten factors. With `crossing` the products of different factors of a column
cost, so that columns have nearly one factor, as clusters do; both values tried are shown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from narrowcast.platform.data.rating_matrix import SampleColumns
from narrowcast.platform.models.factorisation import accuracy_of_clusters, mutual_information
from narrowcast.studies.spec import RunSpec, slug

STUDY = "fedmavg-clustering"
SEEDS, ROUNDS, CLUSTERS, RESTARTS = 5, 300, 10, 10
COLUMNS = {"digits": 1437, "mnist": 2000}
"""Images of each set: all of the digits for training, and some of MNIST's."""
PARTITIONS = {
    "one class a client": "clients: 10, partition: {kind: shards, classes_per_client: 1}",
    "classes mixed": "clients: 10, partition: {kind: iid}",
    "one client": "clients: 1, partition: {kind: iid}",
}
CROSSINGS = (0.0, 1.0)


@dataclass(frozen=True)
class ClusterCell:
    """A data set, its partition, and the price of several factors in one column."""

    data: str
    partition: str
    crossing: float

    @property
    def name(self) -> str:
        """The cell in words."""
        return f"{self.data}, {self.partition}, crossing {self.crossing:g}"

    @property
    def run(self) -> RunSpec:
        """The run of this cell."""
        return RunSpec(
            f"{STUDY}-{self.data}-{slug(self.partition)}-{self.crossing:g}",
            "fedavg-digits",
            (
                f"data={{kind: sample_columns, set: {self.data}, columns: {COLUMNS[self.data]}, "
                f"{PARTITIONS[self.partition]}}}",
                f"model={{kind: masked_factorisation, rank: {CLUSTERS}, centred: false, initial: uniform, "
                "initial_scale: 0.5, w_set: nonnegative, h_set: nonnegative}",
                "algorithm=fedmavg",
                f"training={{kind: alternating_gradient, crossing: {self.crossing:g}}}",
                "clients_per_round=10",
                "sampling=uniform",
                f"rounds={ROUNDS}",
                f"evaluate_every={ROUNDS}",
                "checkpoint_seconds=100000",
            ),
            data_seed=True,
            memory_gib=0.5,
        )


CELLS = tuple(
    ClusterCell(data, partition, crossing) for data in COLUMNS for partition in PARTITIONS for crossing in CROSSINGS
)


def k_means(data: str, seed: int) -> tuple[float, float]:
    """Return the accuracy and the normalised mutual information of k-means on the images of a seed, all in one place.

    The best of `RESTARTS` starts by its own objective (scikit-learn's Lloyd iterations from k-means++).
    """
    from sklearn.cluster import KMeans  # takes a second

    matrix = SampleColumns.model_validate({"set": data, "columns": COLUMNS[data], "seed": seed}).load()
    columns = matrix.values.reshape(matrix.n_users, matrix.n_items)
    found = KMeans(CLUSTERS, n_init=RESTARTS, random_state=seed).fit_predict(columns).astype(np.int64)
    assert matrix.labels is not None
    return accuracy_of_clusters(found, matrix.labels), mutual_information(found, matrix.labels)
