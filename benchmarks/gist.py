"""Wall-clock time of a GIST round with two sub-networks: in this process, on one actor of Ray and on two.

On Cora and on drawn graphs of 10,000 and 100,000 nodes, with one step between synchronisations and with ten. The models
have to be the same everywhere.

    python benchmarks/gist.py [--rounds 8] [--graphs cora] [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path
from statistics import median

from narrowcast.cluster.backend import RayBackend
from narrowcast.experiment import build_experiment
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import Backend, LocalBackend
from narrowcast.platform.rounds.state import Run, start

GRAPHS = {
    "cora": {"kind": "cora", "clients": 2, "projected_features": 1432},
    **{
        f"{nodes:,} nodes": {
            "kind": "block_model",
            "clients": 2,
            "nodes": nodes,
            "blocks": 10,
            "degree": 10,
            "features": 64,
        }
        for nodes in (10_000, 100_000)
    },
}
BACKENDS: dict[str, Backend] = {
    "in process": LocalBackend(),
    "1 actor": RayBackend(actors=1),
    "2 actors": RayBackend(actors=2),
}
WARM_UP = 2
COLUMNS = ("graph", "steps", "where", "seconds_per_round", "load", "model_sha256")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--graphs", nargs="*", default=list(GRAPHS))
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rows = []
    for graph in arguments.graphs:
        for steps in (1, 10):
            found = [measured(graph, steps, where, arguments.rounds + WARM_UP) for where in BACKENDS]
            for row in found:
                print(*row, flush=True)
            if len({row[-1] for row in found}) != 1:
                raise SystemExit(f"{graph}: the backends disagree on the model")
            rows += found
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([COLUMNS, *rows])


def measured(graph: str, steps: int, where: str, rounds: int) -> tuple[str, int, str, float, float, str]:
    """Return a row: the median round after the warm-up, the load during it, and the model."""
    built = build_experiment(
        {
            **{"name": "gist", "rounds": rounds, "clients_per_round": 2, "chunk_size": 1, "evaluate_every": rounds},
            "data": GRAPHS[graph],
            "model": {"kind": "gcn", "hidden": [64], "layer_norm": "graph"},
            "algorithm": {"kind": "submodel", "widths": [0.5], "slices": "disjoint", "weights": "equal"},
            "training": {"kind": "graph", "epochs": steps},
        },
        "gist",
    )
    run = Run(built, built.secured_algorithm, built.task(built.data_source.load()))
    outcomes = list(BACKENDS[where].run(run, start(run)))
    state = outcomes[-1].state
    assert state is not None, "the last round has a checkpoint"
    seconds = median(outcome.wall_seconds for outcome in outcomes[WARM_UP:-1])  # the last round is evaluated
    return graph, steps, where, round(seconds, 4), round(os.getloadavg()[0], 1), model_sha256(run.algorithm, state)


if __name__ == "__main__":
    main()
