"""The dispatch loop: keeps workers busy with batches from a queue, which decides what to run, stop and retry."""

from __future__ import annotations

import time
from typing import Protocol

from narrowcast.cluster.worker_pool import Done, WorkerDied, WorkerPool
from narrowcast.platform.interruption import STOPPING
from narrowcast.tuning.trial_runner import Evaluation, TrialBatch

_MESSAGE_SECONDS = 5.0
_POLL_SECONDS = 1.0


class TrialQueue(Protocol):
    """Decides what workers do; `dispatch` carries it out."""

    def next_batch(self) -> TrialBatch | None:
        """Return trials for a free worker; None if there are none now."""
        ...

    def evaluated(self, evaluation: Evaluation) -> bool:
        """Process an evaluation; return whether its trial stops here."""
        ...

    def worker_died(self, batch: TrialBatch, reason: str) -> None:
        """Process the loss of a worker during a batch."""
        ...

    def heartbeat(self) -> None:
        """Do what is due every few seconds while workers run."""
        ...

    def is_finished(self) -> bool:
        """Return whether no trials will come; called while no worker runs."""
        ...


def dispatch(queue: TrialQueue, pool: WorkerPool, workers: int) -> None:
    """Run the queue's trials on so many workers until it is finished."""
    free, running = list(range(workers)), dict[int, TrialBatch]()
    while True:
        if STOPPING.is_set():
            raise KeyboardInterrupt  # Python may have lost the first one in a callback
        while free and (batch := queue.next_batch()) is not None:
            worker = free.pop(0)
            running[worker] = batch
            pool.start(worker, batch)
        if not running:
            if queue.is_finished():
                return
            time.sleep(_POLL_SECONDS)
            continue
        received = pool.next_message(_MESSAGE_SECONDS)
        queue.heartbeat()
        if received is None:
            continue
        worker, message = received
        if isinstance(message, Done | WorkerDied):
            batch = running.pop(worker)
            free.append(worker)
            if isinstance(message, WorkerDied):
                queue.worker_died(batch, message.reason)
        else:
            pool.answer(worker, [each.key for each in message if queue.evaluated(each)])
