"""Code shared by the peers: the workload as torch tensors, the network, the clock, and the line that each prints.

Needs torch and numpy only, since each peer runs in its own virtual environment.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Workload:
    """The workload file, read once. `settings` are those of the `Workload` that wrote it."""

    def __init__(self, path: str | Path) -> None:
        arrays = np.load(path)
        self.settings = SimpleNamespace(**json.loads(str(arrays["settings"])))
        self.features, self.labels = _floats(arrays["train_features"]), torch.from_numpy(arrays["train_labels"])
        self.test_features = _floats(arrays["test_features"])
        self.test_labels = torch.from_numpy(arrays["test_labels"])
        self.order, self.indptr = arrays["order"], arrays["indptr"]
        self.cohorts = arrays["cohorts"]
        self._rows, self._row_starts = arrays["rows"], arrays["row_starts"]
        self.initial = {
            name.removeprefix("initial/"): torch.from_numpy(arrays[name])
            for name in arrays.files
            if name.startswith("initial/")
        }

    def rows(self, round_index: int, place: int) -> np.ndarray:
        """Return the samples of the client at index `place` of the cohort, in batch order; rounds count from 0."""
        at = round_index * self.cohorts.shape[1] + place
        return self._rows[self._row_starts[at] : self._row_starts[at + 1]]

    def batches(self, round_index: int, place: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of that client."""
        for part in torch.from_numpy(self.rows(round_index, place)).split(self.settings.batch_size):
            yield self.features[part], self.labels[part]

    def network(self) -> nn.Sequential:
        """Return the network with the initial parameters."""
        module = mlp() if self.settings.network == "mlp" else cnn()
        module.load_state_dict(self.initial)
        return module

    def accuracy(self, parameters: dict[str, Tensor]) -> float:
        """Return the accuracy on the test samples."""
        module = self.network()
        module.load_state_dict(parameters)
        with torch.no_grad():
            guesses = torch.cat([module(part).argmax(dim=1) for part in self.test_features.split(500)])
        return float((guesses == self.test_labels).float().mean())


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


@dataclass
class Stopwatch:
    """The seconds of each round, and this process's processor time: since `start` or the last `lap`, or those given
    to `add`, without processor time."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    _last: float = 0.0
    _last_cpu: float = 0.0

    def start(self) -> None:
        self._last, self._last_cpu = time.perf_counter(), time.process_time()

    def lap(self) -> None:
        before, before_cpu = self._last, self._last_cpu
        self.start()
        self.seconds.append(self._last - before)
        self.cpu_seconds.append(self._last_cpu - before_cpu)

    def add(self, seconds: float) -> None:
        self.seconds.append(seconds)


def arguments(**options: Any) -> argparse.Namespace:
    """Parse the command line of a peer: workload, number of rounds, file for the parameters."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--parameters", type=Path, required=True)
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    torch.set_num_threads(1)
    return parser.parse_args()


def report(
    workload: Workload, watch: Stopwatch, parameters: dict[str, Tensor], path: Path, every_round: Sequence[Any] = ()
) -> None:
    """Write the final parameters, or those of every round, and print the result as the last line."""
    tensors = every_round or [parameters]
    np.savez(path, **{f"{index}/{name}": values for index, each in enumerate(tensors) for name, values in each.items()})
    cpu = watch.cpu_seconds or [0.0] * len(watch.seconds)
    line = {"round_seconds": watch.seconds, "cpu_seconds": cpu, "accuracy": workload.accuracy(parameters)}
    print("\n" + json.dumps(line), flush=True)


def _floats(features: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(features)
    return tensor.to(torch.float32) / 255 if tensor.dtype == torch.uint8 else tensor
