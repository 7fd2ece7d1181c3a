"""Seconds of a step of low-rank adapters beside plain peft on one core, and the memory of 20 clients with one base.

A step is forward, backward and SGD on a batch of 16 windows of 24 tokens, with adapters of rank 8 at queries and values
of a BERT that is drawn, not downloaded. Rounds of one client of 32 steps, and 10 steps of a loop of peft and torch, are
timed in turn, in seconds of the processor; a round has the broadcast, the upload and the server's mean too. Memory is
the most that a process of its own had, less what it had when data and base were there. Needs the packages of the extra
`dev`.

    python benchmarks/adapters.py [--repeats 5] [--width 384] [--layers 6]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

import other_modules

STEPS, BATCH, CLIENTS, RANK = 10, 16, 20, 8
TARGETS = ("*.query.weight", "*.value.weight")


def experiment_of(file: Path, width: int, layers: int, clients: int, rounds: int) -> Any:
    """Return the experiment of rounds in which all clients take part."""
    from narrowcast.experiment import Experiment

    heads = max(1, width // 32)
    config = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
              "intermediate_size": 4 * width, "vocab_size": 30522}  # fmt: skip
    base = {"kind": "transformers", "architecture": "BertForSequenceClassification", "config": config}
    return Experiment(
        rounds=rounds, clients_per_round=clients, chunk_size=clients, evaluate_every=1000,
        data={"kind": "npz", "path": str(file), "clients": clients, "validation_share": 0.0},
        model={"kind": "adapters", "base": base, "rank": RANK, "targets": TARGETS},
        algorithm="lora",
        training={"kind": "sgd", "learning_rate": 0.01, "batch_size": BATCH},
    )  # fmt: skip


def run_of(experiment: Any) -> Any:
    """Return the run of an experiment, with its data and model built."""
    from narrowcast.platform.rounds.state import Run

    return Run(experiment, experiment.algorithm, experiment.task(experiment.data_source.load()))


def seconds_here(run: Any) -> list[float]:
    """Return the seconds of a step in each round but the first and the last, which is evaluated."""
    from narrowcast.platform.rounds.loop import LocalBackend
    from narrowcast.platform.rounds.state import start

    ends = [time.process_time() for _ in LocalBackend().run(run, start(run))]
    steps = -(-int(run.task.data.examples.max()) // BATCH)
    return [(after - before) / steps for before, after in pairwise(ends)][:-1]


def peft_step(run: Any) -> Callable[[], None]:
    """Return a step of peft and torch on the samples and the base of a run."""
    from peft import LoraConfig, get_peft_model

    data, model = run.task.data, run.task.model
    names = [pattern.split(".")[1] for pattern in TARGETS]
    module = get_peft_model(model.base.typed_module(data), LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names))
    module.train()
    optimizer = torch.optim.SGD([each for each in module.parameters() if each.requires_grad], lr=0.01)
    inputs = {name: torch.from_numpy(values[:BATCH]) for name, values in data.train.features.items()}
    labels = torch.from_numpy(data.train.labels[:BATCH])

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(**inputs).logits, labels).backward()
        optimizer.step()

    return step


def seconds_of_peft(step: Callable[[], None]) -> float:
    """Return the mean seconds of some steps."""
    began = time.process_time()
    for _ in range(STEPS):
        step()
    return (time.process_time() - began) / STEPS


def most_memory(file: Path, width: int, layers: int, clients: int) -> tuple[float, float]:
    """Return the MB of the base, and the most that a round took above data and base, in this process."""
    from narrowcast.platform.models.neural_network import skeleton
    from narrowcast.platform.rounds.loop import LocalBackend
    from narrowcast.platform.rounds.state import start

    run = run_of(experiment_of(file, width, layers, clients, 1))
    state, module = start(run), skeleton(run.task.model, run.task.data)
    size = sum(tensor.nbytes for tensor in module.state_dict().values()) / 1e6
    before = psutil.Process().memory_info().rss
    list(LocalBackend().run(run, state))
    return size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6 - before / 1e6


def main() -> None:
    """Print the seconds and the memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    other_modules._transformers()
    size = (arguments.width, arguments.layers)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "texts.npz"
        other_modules.write_texts(file)
        if arguments.memory_of:
            print(*most_memory(file, *size, arguments.memory_of))
            return
        run = run_of(experiment_of(file, *size, 1, 4))
        step = peft_step(run)
        step()
        ours, theirs = [], []
        for _ in range(arguments.repeats):
            theirs.append(seconds_of_peft(step))
            ours += seconds_here(run)
        ratio = median(ours) / median(theirs)
        print(f"peft {median(theirs):.4f} s a step, here {median(ours):.4f} s, ratio {ratio:.2f}", flush=True)
    for clients in (1, CLIENTS):
        words = [sys.executable, __file__, "--width", str(size[0]), "--layers", str(size[1])]
        words += ["--memory-of", str(clients)]
        said = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
        print(f"{clients} clients: base {float(said[0]):.0f} MB, a round took {float(said[1]):.0f} MB more")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
