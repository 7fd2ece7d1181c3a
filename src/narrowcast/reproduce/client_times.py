"""CPU time of the slowest client and of the server per round, with every client trained alone.

Seconds are CPU seconds of the one thread that trains, so that other load on the machine has little effect.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from narrowcast.platform.round_closing import close_round
from narrowcast.platform.round_opening import open_round
from narrowcast.platform.run import Run
from narrowcast.platform.state import LiveState, start
from narrowcast.platform.threads import one_thread


def measure_times(run: Run) -> Mapping[str, Any]:
    """Return the seconds of the slowest client and of the server, mean over the rounds after the first."""
    plan, algorithm, task = run.plan, run.algorithm, run.task
    live = LiveState.of(run, start(run))
    slowest, server = [], []
    while live.rounds_left:
        with one_thread():
            opened = open_round(live)
            results, seconds = [], []
            for chunk in opened.chunks:
                began = time.thread_time()
                results.append(algorithm.train(opened.broadcast.arrays, chunk, task))
                seconds.append(time.thread_time() - began)
            began = time.thread_time()
            total = algorithm.fold([result.partial for result in results])
            algorithm.step(live.server, opened.broadcast.arrays, total, task, opened.round_index)
            server.append(time.thread_time() - began)
            slowest.append(max(seconds))
            close_round(live, opened, results)
    measured = slice(1 if plan.rounds > 1 else 0, None)
    return {"client_seconds": float(np.mean(slowest[measured])), "server_seconds": float(np.mean(server[measured]))}
