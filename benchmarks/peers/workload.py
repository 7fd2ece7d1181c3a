"""Write the workload that every peer replays: samples, partition, and narrowcast's cohorts and batches.

narrowcast draws its cohorts and shuffles from keyed streams, so they are known before anything runs; the peers are
given them and draw nothing, which favours the peers.

    python benchmarks/peers/workload.py digits FILE.npz
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.models.networks import CNN, MLP
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.rounds.fleet import LogNormalFleet
from narrowcast.platform.rounds.opening import sample_cohort
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.seeds import PrivateSeed

SEED = 0


@dataclass(frozen=True)
class Workload:
    """What is trained: one local epoch of SGD for `clients_per_round` of `clients`, `rounds` times.

    At `gate_learning_rate` two correct programs stay together: at the CNN's own, a rounding error that makes another
    pixel the largest of its pool grows to percents within a hundred steps, against float64 as between two programs.
    """

    name: str
    clients: int
    clients_per_round: int
    rounds: int
    warm_up: int
    batch_size: int
    learning_rate: float
    gate_learning_rate: float
    network: str
    alpha: float = 0.5


WORKLOADS = {
    "digits": Workload(
        "digits",
        200,
        20,
        rounds=60,
        warm_up=10,
        batch_size=10,
        learning_rate=0.1,
        gate_learning_rate=0.1,
        network="mlp",
    ),
    "mnist": Workload(
        "mnist",
        100,
        10,
        rounds=6,
        warm_up=2,
        batch_size=10,
        learning_rate=0.05,
        gate_learning_rate=0.005,
        network="cnn",
    ),
}
NETWORKS: dict[str, NeuralNetwork] = {"mlp": MLP(hidden=(64,)), "cnn": CNN(channels=(16, 32), hidden=128)}


def plan(workload: Workload, rounds: int, chunk_size: int) -> Plan:
    """Return narrowcast's plan of the rounds, without evaluation or checkpoint before the last."""
    return Plan(
        seed=SEED,
        rounds=rounds,
        clients_per_round=workload.clients_per_round,
        sampling="uniform",
        chunk_size=chunk_size,
        evaluate_every=10**6,
        checkpoint_seconds=10**6,
    )


def make_task(workload: Workload, arrays: Any) -> Task:
    """The task from the arrays of a workload file."""
    samples = Samples(
        name=workload.name,
        source="benchmark",
        n_classes=10,
        train=Labelled(_floats(arrays["train_features"]), arrays["train_labels"]),
        validation=Labelled(_floats(arrays["test_features"][:0]), arrays["test_labels"][:0]),
        test=Labelled(_floats(arrays["test_features"]), arrays["test_labels"]),
        order=arrays["order"],
        indptr=arrays["indptr"],
    )
    training = SGD(learning_rate=workload.learning_rate, batch_size=workload.batch_size, epochs=1)
    model = NETWORKS[workload.network]
    profiles = LogNormalFleet().profiles(samples.examples, SEED)
    task = Task(samples, profiles, model, training, SEED, PrivateSeed.derived(SEED))
    model.check(samples)
    training.check(task)
    return task


def write(workload: Workload, path: Path) -> None:
    """Draw the partition, the cohorts and the batches, and write them with the samples and the initial parameters.

    Arrays: cohorts [rounds, C]; rows, the samples in the order in which each client of each cohort trains on them, and
    row_starts [rounds * C + 1], where those of each begin; initial/NAME, the parameters before round 1.
    """
    arrays = partitioned(workload)
    task = make_task(workload, arrays)
    draws = plan(workload, workload.rounds, workload.clients_per_round)
    visits = draws.sampling.order(draws.seed, workload.clients)
    cohorts = np.stack([sample_cohort(draws, visits, number) for number in range(1, workload.rounds + 1)])
    pieces = [
        _batches(task, workload.batch_size, number, client)
        for number, cohort in enumerate(cohorts, start=1)
        for client in cohort
    ]
    initial = {f"initial/{name}": values for name, values in task.model.init_server(task.data, SEED).items()}
    np.savez(
        path,
        **arrays,
        **initial,
        cohorts=cohorts,
        rows=np.concatenate(pieces),
        row_starts=np.cumsum([0, *(len(piece) for piece in pieces)]),
        settings=np.array(json.dumps(asdict(workload))),
    )


def partitioned(workload: Workload) -> dict[str, NDArray[Any]]:
    """The samples, and who has which: order and indptr as in `Samples`."""
    arrays = dict(zip(("train_features", "train_labels", "test_features", "test_labels"), _read(workload), strict=True))
    arrays["order"], arrays["indptr"] = dirichlet(arrays["train_labels"], workload.clients, workload.alpha)
    return arrays


def dirichlet(labels: NDArray[np.int64], n_clients: int, alpha: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split every class in Dirichlet(alpha) shares; a client without samples gets one from the largest."""
    generator = np.random.default_rng(SEED)
    hands: list[list[int]] = [[] for _ in range(n_clients)]
    for label in np.unique(labels):
        own = generator.permutation(np.flatnonzero(labels == label))
        cuts = np.rint(np.cumsum(generator.dirichlet([alpha] * n_clients)) * len(own)).astype(np.int64)[:-1]
        for hand, part in zip(hands, np.split(own, cuts), strict=True):
            hand.extend(part.tolist())
    for hand in hands:
        if not hand:
            hand.append(max(hands, key=len).pop())
    return np.concatenate([np.array(hand) for hand in hands]), np.cumsum([0, *map(len, hands)])


def _batches(task: Task, batch_size: int, round_index: int, client: int) -> NDArray[np.int64]:
    one = np.array([client])
    keys = task.private_seed.stream_keys("shuffle", round_index, one)
    schedule = draw_schedule(task.data.examples[one], np.array([1]), batch_size, keys)
    return task.data.order[task.data.indptr[client] + schedule.samples[schedule.valid]]


def _floats(features: NDArray[Any]) -> NDArray[np.float32]:
    return features.astype(np.float32) / 255 if features.dtype == np.uint8 else features


def _read(workload: Workload) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[Any], NDArray[np.int64]]:
    if workload.name == "digits":
        from sklearn.datasets import load_digits

        bunch = load_digits()
        order = np.random.default_rng(SEED).permutation(len(bunch.target))
        features, labels = (bunch.data / 16).astype(np.float32)[order], bunch.target.astype(np.int64)[order]
        return features[:1437], labels[:1437], features[1437:], labels[1437:]
    folder = Path(os.environ.get("NARROWCAST_DATA", ".")) / "mnist"
    if not folder.is_dir():
        raise SystemExit(f"{folder} is not there; set NARROWCAST_DATA to the folder that holds mnist/")
    train, test = (
        (_idx(folder / f"{part}-images-idx3-ubyte.gz", 16), _idx(folder / f"{part}-labels-idx1-ubyte.gz", 8))
        for part in ("train", "t10k")
    )
    return (
        train[0].reshape(-1, 1, 28, 28), train[1].astype(np.int64),
        test[0].reshape(-1, 1, 28, 28), test[1].astype(np.int64),
    )  # fmt: skip


def _idx(path: Path, header: int) -> NDArray[np.uint8]:
    return np.frombuffer(gzip.decompress(path.read_bytes()), dtype=np.uint8, offset=header)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    write(WORKLOADS[arguments.workload], arguments.path)
