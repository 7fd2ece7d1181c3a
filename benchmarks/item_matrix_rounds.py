"""Milliseconds of a round of FedMF on MovieLens-1M in this process, by codec, and of its kernel alone.

A float32 round takes turns with the fused kernel on the clients of the same round, samples and sum included. Processor
seconds of the thread are beside wall seconds, since they depend less on other load. One thread.

    python benchmarks/item_matrix_rounds.py [--rounds 30] [--only float32 svd ...]
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import factorisation_step
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.contracts import Task
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.rounds.state import Run, start

LEVELS = "{kind: quantise, levels: 16, norms: column, rounding: dithered, norm_type: bfloat16}, entropy"
TENSOR_LEVELS = LEVELS.replace("column", "tensor")
CODECS = {
    "float32": "algorithm.codec=[]",
    "svd": f"algorithm.codec=[{{kind: svd, rank: 1}}, {LEVELS}]",
    "adaptive_svd": f"algorithm={{kind: adaptive_svd, rank: 1, codec: [{LEVELS}]}}",
    "quantise": f"algorithm.codec=[{LEVELS}]",
    "eden": "algorithm.codec=[{kind: eden, levels: 2}, entropy]",
    "top_k": f"algorithm.codec=[{{kind: top_k, fraction: 0.01}}, {TENSOR_LEVELS}]",
}
Seconds = list[tuple[float, float]]
"""Wall and processor seconds of each call."""


def timed(call: Callable[[], Any], seconds: Seconds) -> None:
    wall, processor = time.perf_counter(), time.thread_time()
    call()
    seconds.append((time.perf_counter() - wall, time.thread_time() - processor))


def rounds_and_kernel(codec: str, rounds: int) -> tuple[Seconds, Seconds]:
    """Return the seconds of each round and, of a float32 run, of the kernel on the round's clients."""
    rows = [] if codec == "adaptive_svd" else ["algorithm.rows=touched"]
    often = [f"{field}={10 * rounds + 100}" for field in ("evaluate_every", "checkpoint_every")]
    settings = ["backend=local", f"rounds={rounds + 3}", *often, *rows, CODECS[codec]]
    experiment = load_experiment("fedmf-ml1m", settings)
    task = experiment.task(experiment.data_source.load())
    run = Run(experiment, experiment.secured_algorithm, task)
    outcomes = iter(experiment.backend.run(run, start(run)))
    kernels = kernels_of(experiment, task, rounds) if codec == "float32" else []
    for _ in range(2):
        next(outcomes)  # the first rounds compile
    of_rounds: Seconds = []
    of_kernels: Seconds = []
    for place in range(rounds):
        timed(lambda: next(outcomes), of_rounds)
        if kernels:
            timed(kernels[place], of_kernels)
    return of_rounds, of_kernels[1:]


def kernels_of(experiment: Experiment, task: Task, rounds: int) -> list[Callable[[], Any]]:
    item_factors = np.asarray(task.model.init_server(task.data, task.seed)[ITEM_FACTORS])
    inputs = [factorisation_step.prepare(experiment, task, index, item_factors, None) for index in range(3, rounds + 3)]
    return [lambda this=this: factorisation_step.fused(this) for this in inputs]


def line(name: str, seconds: Seconds) -> str:
    columns = []
    for values in zip(*seconds, strict=True):
        low, middle, high = 1e3 * np.quantile(values, [0.25, 0.5, 0.75])
        columns.append(f"{middle:7.1f} ({low:6.1f} to {high:6.1f})")
    return f"{name:14s} {'  '.join(columns)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", nargs="*", choices=CODECS, default=list(CODECS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    print(f"{'':14s} {'wall ms':>7s} (quartiles)          {'processor ms':>7s} (quartiles)")
    for codec in arguments.only:
        of_rounds, of_kernels = rounds_and_kernel(codec, arguments.rounds)
        print(line(codec, of_rounds), flush=True)
        if of_kernels:
            ratio = np.median(of_rounds, axis=0) / np.median(of_kernels, axis=0)
            print(
                line("  its kernel", of_kernels), f"  ratio {ratio[0]:.2f} wall, {ratio[1]:.2f} processor", flush=True
            )
    print(f"load average {before:.2f} to {os.getloadavg()[0]:.2f}; medians of {arguments.rounds} rounds of 60 clients")


if __name__ == "__main__":
    main()
