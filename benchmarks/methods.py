"""Milliseconds per round of optimisation, fairness and personal methods and aggregators on digits, beside FedAvg's.

Each repeat runs the methods in turn, in this process with one thread. The first rounds of a run are not counted; the
median over repeats of a run's median round and its range are printed as a Markdown table.

    python benchmarks/methods.py [--rounds 200] [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from statistics import median

from narrowcast.experiment import load_experiment
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.state import Run, start

WARM_UP_ROUNDS = 20
METHODS: Mapping[str, str] = {
    "FedAvg": "fedavg",
    "FedAvg again": "fedavg",
    "FedProx": "fedprox",
    "SCAFFOLD": "scaffold",
    "FedNova": "fednova",
    "FedDyn": "feddyn",
    "FedAvgM": "{kind: fedavg, server_optimizer: momentum}",
    "FedAdam": "{kind: fedavg, server_optimizer: adam, server_learning_rate: 0.01}",
    "FedYogi": "{kind: fedavg, server_optimizer: yogi, server_learning_rate: 0.01}",
    "FedAdagrad": "{kind: fedavg, server_optimizer: adagrad, server_learning_rate: 0.01}",
    "q-FFL": "qffl",
    "AFL": "afl",
    "median": "{kind: fedavg, aggregator: median}",
    "geometric median": "{kind: fedavg, aggregator: geometric_median}",
    "Krum": "{kind: fedavg, aggregator: krum}",
    "Bulyan": "{kind: fedavg, aggregator: {kind: bulyan, byzantine: 2}}",
    "norm clip": "{kind: fedavg, aggregator: norm_clip}",
    "centred clip": "{kind: fedavg, aggregator: centred_clip}",
    "NNM, median": "{kind: fedavg, aggregator: {kind: nnm, byzantine: 2}}",
    "alone": "local",
    "Ditto": "ditto",
    "APFL": "apfl",
    "APFL, adaptive": "{kind: apfl, alpha_rate: 0.1}",
    "FedPer": "partial",
    "Per-FedAvg, first order": "per_fedavg",
    "Per-FedAvg, exact": "{kind: per_fedavg, hessian: exact}",
    "Per-FedAvg, difference": "{kind: per_fedavg, hessian: difference}",
    "pFedMe, 5 inner steps": "pfedme",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    repeats = [
        {name: milliseconds(fields, given.rounds) for name, fields in METHODS.items()} for _ in range(given.repeats)
    ]
    print(f"load {os.getloadavg()[0]:.1f}\n\n| method | ms per round, median | range | relative to FedAvg |")
    print("|---|---|---|---|")
    reference = median(each["FedAvg"] for each in repeats)
    for name in METHODS:
        times = [each[name] for each in repeats]
        middle = median(times)
        print(f"| {name} | {middle:.2f} | {min(times):.2f} to {max(times):.2f} | {middle / reference:.2f} |")


def milliseconds(algorithm: str, rounds: int) -> float:
    """Return the median round of a run after the warm-up."""
    overrides = [f"rounds={WARM_UP_ROUNDS + rounds}", "evaluate_every=1000000", "checkpoint_seconds=1000000"]
    overrides.append("evaluate_clients=test")  # once, at the end: for methods without a global model
    experiment = load_experiment("fedavg-digits", [*overrides, f"algorithm={algorithm}"])
    run = Run(experiment, experiment.algorithm, experiment.task(experiment.data_source.load()))
    outcomes = list(LocalBackend().run(run, start(run)))
    return 1e3 * median(outcome.wall_seconds for outcome in outcomes[WARM_UP_ROUNDS:-1])  # the last one is evaluated


if __name__ == "__main__":
    main()
