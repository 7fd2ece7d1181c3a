"""pfl-research: FedAvg on its SimulatedBackend, in one process or, by torchrun, in several.

Its sampler and its data sets are pfl's own hooks, so the cohorts and batches are those of the workload.
"""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from replay import Stopwatch, Workload, arguments, report
from torch import nn


class Network(nn.Module):
    """pfl wants the loss as a method of the module."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(features), labels)

    def metrics(self, features: torch.Tensor, labels: torch.Tensor) -> dict:  # noqa: ARG002
        return {}


class Laps(TrainingProcessCallback):
    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # noqa: ARG002
        self.watch.lap()
        return False, Metrics()


def main() -> None:
    options = arguments(processes={"type": int, "default": 1})
    if options.processes > 1 and "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        sys.exit(subprocess.run([*torchrun, str(options.processes), *sys.argv], check=False).returncode)
    logging.disable(logging.WARNING)
    workload = Workload(options.workload)
    cohort_size, rate = workload.cohorts.shape[1], workload.settings.learning_rate

    def own_data(visit: tuple[int, int]) -> Dataset:
        rows = torch.from_numpy(workload.rows(*visit))
        return Dataset((workload.features[rows], workload.labels[rows]))

    visits = itertools.product(range(options.rounds), range(cohort_size))
    data = FederatedDataset(own_data, lambda: next(visits))
    network = Network(workload.network())
    model = PyTorchModel(
        network, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0)
    )
    watch = Stopwatch()
    watch.start()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=options.rounds,
            evaluation_frequency=10**6,
            train_cohort_size=cohort_size,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=rate, local_batch_size=workload.settings.batch_size
        ),
        callbacks=[Laps(watch)],
    )
    if os.environ.get("RANK", "0") == "0":
        parameters = {name: values.detach() for name, values in network.network.named_parameters()}
        report(workload, watch, parameters, options.parameters)
    if torch.distributed.is_initialized():  # gloo's threads that are left at exit abort the process now and then
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
