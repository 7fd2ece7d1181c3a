"""Flower's simulation on its own Ray, two actors on two cores.

Each message says which client of the cohort its receiver stands for, which is all that the strategy changes in FedAvg.
`--poll` shortens its two fixed waits of 0.1 s: for messages to hand to actors, and for replies.
"""

from __future__ import annotations

import logging
import os
import threading

from flower_client import app
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.server.superlink.fleet.vce import vce_api
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from flwr.simulation import run_simulation
from flwr.superlink.grid import InMemoryGrid
from replay import Stopwatch, Workload, arguments, report


class Replayed(FedAvg):
    """FedAvg on the cohorts of the workload."""

    def __init__(self, workload: Workload, watch: Stopwatch) -> None:
        super().__init__(fraction_evaluate=0.0, min_available_nodes=workload.settings.clients)
        self.workload, self.watch = workload, watch

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid):
        _, online = sample_nodes(grid, self.min_available_nodes, len(self.workload.cohorts[0]))
        nodes = sorted(online)
        messages = []
        for place, client in enumerate(self.workload.cohorts[server_round - 1]):
            config = ConfigRecord({"server-round": server_round, "place": place})
            content = RecordDict({"arrays": arrays, "config": config})
            messages.append(Message(content=content, message_type=MessageType.TRAIN, dst_node_id=nodes[client]))
        return messages

    def aggregate_train(self, server_round, replies):
        result = super().aggregate_train(server_round, replies)
        self.watch.lap()
        return result


def poll_faster(seconds: float) -> None:
    """Cut both waits; the one for messages is a literal in a loop, so the event that it waits on is wrapped."""

    class Impatient(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            return super().wait(min(timeout, seconds) if timeout else timeout)

    stock = vce_api.add_messages_to_queue

    def impatient(state, queue, nodes_mapping, f_stop):
        wait = Impatient()
        wait.is_set = f_stop.is_set  # type: ignore[method-assign]
        stock(state, queue, nodes_mapping, wait)

    vce_api.add_messages_to_queue = impatient
    created = InMemoryGrid.__init__

    def init(self, *args, **options):
        created(self, *args, **options)
        self.pull_interval = seconds

    InMemoryGrid.__init__ = init


def main() -> None:
    options = arguments(actors={"type": int, "default": 2}, poll={"type": float, "default": 0.0})
    os.environ["BENCH_WORKLOAD"] = str(options.workload.resolve())
    logging.getLogger("flwr").setLevel(logging.ERROR)
    if options.poll:
        poll_faster(options.poll)
    workload, watch = Workload(options.workload), Stopwatch()
    server, results = ServerApp(), []

    @server.main()
    def run(grid: Grid, context: Context) -> None:  # noqa: ARG001
        strategy, arrays = Replayed(workload, watch), ArrayRecord(workload.network().state_dict())
        watch.start()
        results.append(strategy.start(grid, arrays, num_rounds=options.rounds).arrays)

    run_simulation(
        server_app=server,
        client_app=app,
        num_supernodes=workload.settings.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": options.actors, "address": "local", "log_to_driver": False},
        },
    )
    report(workload, watch, results[0].to_torch_state_dict(), options.parameters)


if __name__ == "__main__":
    main()
