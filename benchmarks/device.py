"""Seconds per round on a CPU and on a GPU: the MNIST network, 10 to 100 clients per round.

Both devices train the same clients on the same batches from the same seed. The first round is not counted, and the
median of the others is reported. The parameters must agree to `TOLERANCE`, relative to the largest entry of a tensor,
after `PARITY_ROUNDS` rounds at a learning rate that keeps rounding errors small.

    python benchmarks/device.py [--rounds 5] [--clients 10 100] [--chunk-sizes 30 100] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median

import numpy as np
import torch

from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.low_rank import SCoLR
from narrowcast.algorithms.local_training.gradients import Device
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.platform.contracts import Algorithm, Task
from narrowcast.platform.data.image_sets import MNIST
from narrowcast.platform.data.partition import Dirichlet
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.models.networks import CNN
from narrowcast.platform.rounds.fleet import LogNormalFleet
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run, start
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import Arrays

TOLERANCE = 1e-3
PARITY_ROUNDS = 2


def main() -> None:
    arguments = _arguments()
    data = MNIST(clients=100, partition=Dirichlet(alpha=0.5)).load()
    rows = []
    for algorithm in (FedAvg(), SCoLR(rank=8)):
        for clients in arguments.clients:
            _, on_cpu = run(algorithm, data, "cpu", clients, PARITY_ROUNDS, learning_rate=1e-3)
            cpu_seconds, _ = run(algorithm, data, "cpu", clients, 1 + arguments.rounds)
            for chunk_size in (
                size for size in arguments.chunk_sizes if size <= max(clients, min(arguments.chunk_sizes))
            ):
                _, on_gpu = run(algorithm, data, "cuda", clients, PARITY_ROUNDS, chunk_size, learning_rate=1e-3)
                apart = max(
                    float(np.abs(on_gpu[name] - values).max() / np.abs(values).max()) for name, values in on_cpu.items()
                )
                if apart > TOLERANCE:
                    raise SystemExit(f"{algorithm.kind}: CPU and GPU differ by {apart:.1e}, more than {TOLERANCE:.0e}")
                gpu_seconds, _ = run(algorithm, data, "cuda", clients, 1 + arguments.rounds, chunk_size)
                row = {"algorithm": algorithm.kind, "clients_per_round": clients, "chunk_size": chunk_size}
                rows.append({**row, "apart": apart, "cpu": cpu_seconds, "cuda": gpu_seconds})
                print(json.dumps(rows[-1]), flush=True)
    report = {"rows": rows, "gpu": torch.cuda.get_device_name(), "cpus": os.cpu_count(), "load": os.getloadavg()}
    print(json.dumps(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))


def run(
    algorithm: Algorithm,
    data: Samples,
    device: Device,
    clients: int,
    n_rounds: int,
    chunk_size: int = 30,
    *,
    learning_rate: float = 0.05,
) -> tuple[float, Arrays]:
    """Return the median seconds of the rounds after the first, and the global parameters at the end."""
    training = SGD(learning_rate=learning_rate, device=device)
    task = Task(data, LogNormalFleet().profiles(data.examples, 0), CNN(), training, 0, PrivateSeed.derived(0))
    plan = Plan(rounds=n_rounds, clients_per_round=clients, evaluate_every=n_rounds, chunk_size=chunk_size)
    prepared = Run(plan, algorithm, task)
    prepared.check()
    outcomes = list(LocalBackend().run(prepared, start(prepared)))
    state = outcomes[-1].state
    assert state is not None, "the last round has a checkpoint"
    return median(each.timing.train for each in outcomes[1:]), algorithm.final(state.server)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[30, 100], help="on the GPU; 30 on the CPU")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
