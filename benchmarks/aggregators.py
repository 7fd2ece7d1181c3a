"""Seconds of each aggregator on the changes of many clients, in this process with one thread.

Each repeat runs the rules in turn; the least seconds of the processor, which others on the machine change little, are
printed as a Markdown table.

    python benchmarks/aggregators.py [--clients 100] [--parameters 215000] [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping

import numpy as np

from narrowcast.algorithms.federated import aggregator
from narrowcast.platform.compiled import one_thread
from narrowcast.platform.types import Arrays


def rules(clients: int) -> Mapping[str, aggregator.Aggregator]:
    """Return each rule, for a fifth of the clients byzantine."""
    wild = clients // 5
    return {
        "median": aggregator.CoordinateMedian(),
        "trimmed mean": aggregator.TrimmedMean(share=0.2),
        "geometric median, 4 iterations": aggregator.GeometricMedian(),
        "aggregator.Krum": aggregator.Krum(byzantine=wild),
        "multi-aggregator.Krum": aggregator.Krum(byzantine=wild, selected=clients - wild),
        "aggregator.Bulyan": aggregator.Bulyan(byzantine=wild),
        "norm clip": aggregator.NormClip(),
        "centred clip": aggregator.CentredClip(),
        "sign majority": aggregator.SignMajority(),
        "FLTrust": aggregator.FLTrust(),
        "NNM, median": aggregator.NearestNeighbourMixing(byzantine=wild),
        "bucketing, median": aggregator.Bucketing(),
    }


def seconds(rule: aggregator.Aggregator, changes: Arrays) -> float:
    """Return the seconds of the processor for one aggregate."""
    last = {name: np.zeros_like(values[0]) for name, values in changes.items()}
    reference = {name: values.mean(axis=0) for name, values in changes.items()}
    weights = np.ones(len(next(iter(changes.values()))))
    began = time.process_time()
    rule.aggregate(changes, weights, aggregator.AggregationContext(0, 1, last, reference))
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=215_000)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    draw = np.random.default_rng(0)
    changes = {"w": draw.normal(size=(given.clients, given.parameters)).astype(np.float32)}
    with one_thread():
        repeats = [
            {name: seconds(rule, changes) for name, rule in rules(given.clients).items()} for _ in range(given.repeats)
        ]
    print(f"load {os.getloadavg()[0]:.1f}, {given.clients} clients, {given.parameters:,} parameters\n")
    print("| rule | seconds |\n|---|--:|")
    for name in repeats[0]:
        print(f"| {name} | {min(times[name] for times in repeats):.3f} |")


if __name__ == "__main__":
    main()
