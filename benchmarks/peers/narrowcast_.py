"""narrowcast itself, in this process or on Ray actors, drawing its own cohorts and batches.

In this process a round lasts from one outcome to the next. On Ray the driver delivers outcomes several at a time, so
that the time between two deliveries says nothing: there a round lasts as long as the driver says, `wall_seconds`.
"""

from __future__ import annotations

import numpy as np
import torch
from replay import Stopwatch, arguments, report
from replay import Workload as Replay
from workload import Workload, make_task, plan

from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.cluster.backend import RayBackend
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.state import Run, start


def main() -> None:
    options = arguments(actors={"type": int, "default": 0})
    replay = Replay(options.workload)
    workload, algorithm = Workload(**vars(replay.settings)), FedAvg()
    task = make_task(workload, np.load(options.workload))
    algorithm.check(task)
    backend = RayBackend(actors=options.actors) if options.actors else LocalBackend()
    chunk_size = -(-workload.clients_per_round // max(1, options.actors))
    run = Run(plan(workload, options.rounds, chunk_size), algorithm, task)
    watch, state = Stopwatch(), start(run)
    watch.start()
    for outcome in backend.run(run, state):
        if options.actors:
            watch.add(outcome.wall_seconds)
        else:
            watch.lap()
        state = outcome.state or state
    parameters = {name: torch.from_numpy(np.array(v)) for name, v in algorithm.final(state.server).items()}
    report(replay, watch, parameters, options.parameters)


if __name__ == "__main__":
    main()
