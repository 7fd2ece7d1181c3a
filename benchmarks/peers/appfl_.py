"""APPFL's virtual-time simulator in one process, silenced; the driver is only told whom to pick.

`--memory fast` turns off APPFL's default of collecting garbage several times for each client.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from replay import Stopwatch, Workload, arguments, report

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")
# piq scores images for a report that nothing here asks for, and imports a torchvision that must match torch's build.
sys.modules["piq"] = ModuleType("piq")

from appfl.agent import ClientAgent, ServerAgent  # noqa: E402
from appfl.config import ClientAgentConfig, ServerAgentConfig  # noqa: E402
from appfl.vsim import ClientProfile, SyncSimDriver  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402


class Quiet:
    """A logger for everything that APPFL says."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Own(torch.utils.data.Dataset):
    """A client's samples, in the order in which it will train on them."""

    def __init__(self, workload: Workload, rows: np.ndarray) -> None:
        self.workload, self.rows = workload, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self.rows[index]
        return self.workload.features[row], self.workload.labels[row]


class Client(ClientAgent):
    def __init__(self, config: ClientAgentConfig, workload: Workload, client: int) -> None:
        self.workload, self.client = workload, client
        super().__init__(config)

    def _create_logger(self) -> None:
        self.logger = Quiet()

    def _load_model(self) -> None:
        self.model = self.workload.network()

    def _load_metric(self) -> None:
        self.metric = lambda labels, scores: float((scores.argmax(axis=1) == labels).mean())

    def _load_data(self) -> None:
        own = self.workload.order[self.workload.indptr[self.client] : self.workload.indptr[self.client + 1]]
        self.train_dataset, self.val_dataset = Own(self.workload, own), None


class Server(ServerAgent):
    def __init__(self, config: ServerAgentConfig, workload: Workload) -> None:
        self.workload = workload
        super().__init__(config)

    def _create_logger(self) -> None:
        self.logger = Quiet()

    def _load_model(self) -> None:
        self.model = self.workload.network()


class Replayed(SyncSimDriver):
    """The driver on the cohorts of the workload."""

    def __init__(self, workload: Workload, watch: Stopwatch, *args: Any, **options: Any) -> None:
        self.workload, self.watch = workload, watch
        super().__init__(*args, **options)

    def _select_participants(self) -> list[str]:
        cohort = self.workload.cohorts[self._round]
        for place, client in enumerate(cohort):
            self.clients[str(client)].train_dataset.rows = self.workload.rows(self._round, place)
        return [str(client) for client in cohort]

    def _run_round(self) -> bool:
        done = super()._run_round()
        self.watch.lap()
        return done


def main() -> None:
    options = arguments(memory={"choices": ("stock", "fast"), "default": "stock"})
    workload, thrifty = Workload(options.workload), options.memory == "stock"
    scratch = tempfile.mkdtemp(prefix="bench-appfl-")
    os.environ["HOME"] = scratch
    settings, clients = workload.settings, range(workload.settings.clients)
    train = {
        "trainer": "VanillaTrainer", "mode": "epoch", "num_local_epochs": 1, "optim": "SGD",
        "optim_args": {"lr": settings.learning_rate}, "train_batch_size": settings.batch_size,
        "train_data_shuffle": False, "loss_fn": "CrossEntropyLoss", "device": "cpu", "optimize_memory": thrifty,
    }  # fmt: skip
    server_config = ServerAgentConfig(
        client_configs=OmegaConf.create({"train_configs": train, "model_configs": {}}),
        server_configs=OmegaConf.create(
            {
                "num_clients": settings.clients, "num_global_epochs": options.rounds, "optimize_memory": thrifty,
                "aggregator": "FedAvgAggregator",
                "aggregator_kwargs": {"client_weights_mode": "sample_size", "optimize_memory": thrifty},
                "scheduler": "SyncScheduler", "scheduler_kwargs": {"optimize_memory": thrifty},
            }
        ),
    )  # fmt: skip
    server = Server(server_config, workload)
    agents = []
    for client in clients:
        config = ClientAgentConfig(train_configs=OmegaConf.create(copy.deepcopy(train)))
        config.client_id, config.optimize_memory = str(client), thrifty
        agents.append(Client(config, workload, client))
        server.set_sample_size(str(client), agents[-1].get_sample_size())
    watch = Stopwatch()
    driver = Replayed(
        workload, watch, server, agents, {str(client): ClientProfile() for client in clients},
        participants_per_round=workload.cohorts.shape[1], logger=Quiet(), target_rounds=options.rounds,
    )  # fmt: skip
    watch.start()
    driver.run()
    report(workload, watch, dict(server.get_parameters(serial_run=True)), options.parameters)
    Path(scratch).rmdir() if not any(Path(scratch).iterdir()) else None


if __name__ == "__main__":
    main()
