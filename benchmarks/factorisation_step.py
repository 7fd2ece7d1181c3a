"""Seconds per round of local matrix factorisation on MovieLens-1M, one thread: per client, batched, fused.

All programs train the same clients on the same batches, round after round, and must agree with the batched program in
float64 on the averaged update. The per-client loops receive their batches ready; the other two draw their own
within the measured time.

Memory is measured by Linux and glibc, relative to the use before the measured rounds.

    python benchmarks/factorisation_step.py [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy

import argparse
import ctypes
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from narrowcast.algorithms.codecs.low_rank import draw_basis
from narrowcast.algorithms.local_training.factorisation import train_low_rank, train_rows
from narrowcast.algorithms.local_training.factorisation_kernels import (
    Factors,
    Subspace,
    train_low_rank_fused,
    train_rows_fused,
)
from narrowcast.algorithms.local_training.negatives import ChunkBatches, draw_batches, draw_samples
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.contracts import Task
from narrowcast.platform.models.model import ITEM_FACTORS, USER_FACTORS
from narrowcast.platform.rounds.chunks import make_chunks
from narrowcast.platform.rounds.opening import sample_cohort
from narrowcast.platform.rounds.state import Population

BOUND = 1e-6
Steps = list[tuple[Tensor, Tensor]]
"""The batches of one client: items and labels."""
Update = tuple[np.ndarray, np.ndarray]
"""The sum of all changes [N, k], and how many clients touched each row [N]."""


@dataclass(frozen=True)
class Round:
    """The inputs of a round. `basis`: that of CoLR, None for FedMF. `clients`, `users`: one entry per chunk."""

    task: Task
    index: int
    item_factors: np.ndarray
    basis: np.ndarray | None
    clients: list[np.ndarray]
    users: list[np.ndarray]
    steps: list[tuple[np.ndarray, Steps]]  # user factors and batches of each client

    @property
    def width(self) -> int:
        return self.item_factors.shape[1] if self.basis is None else len(self.basis)

    @property
    def scale(self) -> float:
        return 1.0 if self.basis is None else (self.basis.shape[0] / self.basis.shape[1]) ** 0.5


class FactorModule(nn.Module):
    """The model of a client in the released code: full embeddings, gradients divided by occurrence."""

    def __init__(self, n_items: int, dimension: int, basis: Tensor | None) -> None:
        super().__init__()
        self.user = nn.Embedding(1, dimension, scale_grad_by_freq=True)
        self.item = nn.Embedding(n_items, dimension, scale_grad_by_freq=True)
        self.basis = basis
        self.low_rank = None
        if basis is not None:
            self.item.requires_grad_(False)
            self.low_rank = nn.Embedding(n_items, len(basis), scale_grad_by_freq=True)
            scale = (basis.shape[0] / basis.shape[1]) ** 0.5
            self.low_rank.weight.register_hook(lambda gradient: gradient * scale)

    def forward(self, items: Tensor) -> tuple[Tensor, Tensor]:
        x = self.item(items)
        if self.low_rank is not None:
            x = x + self.low_rank(items) @ self.basis
        return x, self.user(torch.zeros_like(items))


def modules_and_optimiser(this: Round) -> Update:
    """Train as the released code does: load the modules, step an SGD optimiser over all parameters, take the change."""
    training, n_items = this.task.training, len(this.item_factors)
    server = torch.from_numpy(this.item_factors)
    basis = None if this.basis is None else torch.from_numpy(this.basis)
    model = FactorModule(n_items, server.shape[1], basis)
    total, touched = torch.zeros(n_items, this.width), torch.zeros(n_items)
    for user_factors, steps in this.steps:
        with torch.no_grad():
            model.user.weight.copy_(torch.from_numpy(user_factors))
            model.item.weight.copy_(server)
            if model.low_rank is not None:
                model.low_rank.weight.zero_()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimiser = torch.optim.SGD(trained, lr=training.learning_rate)
        mask = torch.zeros(n_items)
        for items, labels in steps:
            optimiser.param_groups[0]["lr"] = training.learning_rate * len(items)
            optimiser.zero_grad()
            x, p = model(items)
            loss = nn.functional.binary_cross_entropy_with_logits((x * p).sum(dim=1), labels)
            (loss + training.weight_decay * (x.square().sum() + p.square().sum()) / len(items)).backward()
            optimiser.step()
            mask[items] = 1
        with torch.no_grad():
            total += model.item.weight - server if model.low_rank is None else model.low_rank.weight
            touched += mask
    return total.numpy(), touched.numpy()


def touched_rows_only(this: Round) -> Update:
    """Train with autograd on the rows of each batch only: the fastest loop with a step per client."""
    training, n_items = this.task.training, len(this.item_factors)
    server = torch.from_numpy(this.item_factors)
    basis = None if this.basis is None else torch.from_numpy(this.basis)
    total, touched = torch.zeros(n_items, this.width), torch.zeros(n_items)
    rate, decay = training.learning_rate, 2 * training.weight_decay
    for user_factors, steps in this.steps:
        items, places = torch.unique(torch.cat([items for items, _ in steps]), return_inverse=True)
        before = server[items]
        table = before.clone() if basis is None else before.new_zeros(len(items), len(basis))
        p = torch.from_numpy(user_factors).clone().requires_grad_()
        for rows, (_, labels) in zip(places.split([len(items) for items, _ in steps]), steps, strict=True):
            leaf = table[rows].requires_grad_()
            x = leaf if basis is None else torch.addmm(before[rows], leaf, basis)
            loss = nn.functional.binary_cross_entropy_with_logits(x @ p, labels, reduction="sum")
            leaf_gradient, user_gradient = torch.autograd.grad(loss, [leaf, p])
            with torch.no_grad():
                pull = x if basis is None else x @ basis.T
                step = leaf_gradient.add_(pull, alpha=decay).mul_(-rate * this.scale)
                table.index_copy_(0, rows, step.add_(leaf))
                p -= rate * (user_gradient / len(labels) + decay * p)
        total.index_add_(0, items, table - before if basis is None else table)
        touched[items] += 1
    return total.numpy(), touched.numpy()


def batched(this: Round, dtype: torch.dtype = torch.float32) -> Update:
    """Train the clients of a chunk as one tensor program; in float64 it is the reference."""
    parts = []
    for clients, users in zip(this.clients, this.users, strict=True):
        batches = draw_batches(this.task, clients, this.index)
        item_factors = torch.from_numpy(this.item_factors).to(dtype)
        arguments = (item_factors, torch.from_numpy(users[batches.order]).to(dtype))
        if this.basis is None:
            result = train_rows(*arguments, batches, this.task.training)
        else:
            everything = np.ones((len(clients), len(this.basis)), dtype=bool)
            result = train_low_rank(*arguments, Subspace(this.basis, everything), batches, this.task.training)
        total = np.zeros((len(item_factors), this.width), dtype=result.row_changes.numpy().dtype)
        for start, stop in zip(batches.row_starts, batches.row_starts[1:], strict=False):
            total[batches.row_items[start:stop]] += result.row_changes[start:stop].numpy()
        parts.append((total, np.bincount(batches.row_items, minlength=len(total))))
    return sum(part for part, _ in parts), sum(part for _, part in parts)


def fused(this: Round, threads: int = 1) -> Update:
    """Train client after client in compiled loops."""
    parts = []
    for clients, users in zip(this.clients, this.users, strict=True):
        training = this.task.training
        samples = draw_samples(this.task, clients, this.index, threads)
        start, weights = Factors(this.item_factors, users[samples.order]), np.ones(len(clients), dtype=np.float32)
        if this.basis is None:
            result = train_rows_fused(start, samples, training, weights, threads)
        else:
            everything = np.ones((len(clients), len(this.basis)), dtype=bool)
            subspace = Subspace(this.basis, everything)
            result = train_low_rank_fused(start, subspace, samples, training, weights, threads)
        parts.append((result.total, result.touched))
    return sum(part for part, _ in parts), sum(part for _, part in parts)


PROGRAMS: dict[str, Callable[[Round], Update]] = {
    "per client, modules and optimiser": modules_and_optimiser,
    "per client, touched rows only": touched_rows_only,
    "batched torch program": batched,
    "fused kernel": fused,
    "fused kernel, 2 threads": lambda this: fused(this, threads=2),
}


def client_steps(batches: ChunkBatches, users: np.ndarray) -> list[tuple[np.ndarray, Steps]]:
    """Return user factors and batches of each client of a chunk, as the per-client loops expect them."""
    steps: list[Steps] = [[] for _ in batches.order]
    place = np.concatenate([np.arange(active) for active in batches.active])
    for client, rows, labels, valid in zip(place, batches.rows, batches.labels, batches.valid, strict=True):
        items = torch.from_numpy(batches.row_items[rows[valid]])
        steps[client].append((items, torch.from_numpy(labels[valid]).float()))
    return list(zip(users[batches.order], steps, strict=True))


def prepare(experiment: Experiment, task: Task, index: int, item_factors: np.ndarray, rank: int | None) -> Round:
    """Return the inputs of a round: its clients in the experiment's chunks, and their batches."""
    dimension = item_factors.shape[1]
    basis = None if rank is None else draw_basis("orthonormal", rank, dimension, index)
    chunks = make_chunks(
        sample_cohort(experiment, experiment.sampling.order(experiment.seed, task.data.n_clients), index),
        task.data.examples,
        experiment.chunk_size,
        index,
        Population.fresh(task.model.init_clients(task.data, task.private_seed.value), task.data.n_clients),
    )
    users = [np.asarray(chunk.state[USER_FACTORS]) for chunk in chunks]
    steps: list[tuple[np.ndarray, Steps]] = []
    for chunk, factors in zip(chunks, users, strict=True):
        steps += client_steps(draw_batches(task, chunk.clients, index), factors)
    return Round(task, index, item_factors, basis, [chunk.clients for chunk in chunks], users, steps)


def mean(update: Update) -> np.ndarray:
    return update[0] / np.maximum(update[1], 1)[:, None]


def measure(name: str, rank: int | None, repeats: int) -> list[dict]:
    """Run the same rounds with each program; the first round of each is a warm-up."""
    experiment = load_experiment("fedmf-ml1m", [])
    task = experiment.task(experiment.data_source.load())
    item_factors = task.model.init_server(task.data, task.seed)[ITEM_FACTORS]
    inputs, references = [], []
    for index in range(1, repeats + 2):
        inputs.append(prepare(experiment, task, index, item_factors, rank))
        references.append(mean(batched(inputs[-1], torch.float64)))
        change = references[-1] if rank is None else references[-1] @ inputs[-1].basis
        item_factors = item_factors + change.astype(np.float32)
    seconds: dict[str, list[float]] = {program: [] for program in PROGRAMS}
    errors, peaks = dict.fromkeys(PROGRAMS, 0.0), dict.fromkeys(PROGRAMS, 0.0)
    for program, run in PROGRAMS.items():
        for this, reference in zip(inputs, references, strict=True):
            if this is inputs[1]:
                before = reset_peak_memory()
            began = time.perf_counter()
            update = run(this)
            seconds[program].append(time.perf_counter() - began)
            error = float(np.linalg.norm(mean(update) - reference) / np.linalg.norm(reference))
            errors[program] = max(errors[program], error)
        peaks[program] = peak_memory() - before
    if max(errors.values()) > BOUND:
        raise SystemExit(f"{name}: relative errors of the averaged update, {errors}, above {BOUND:g}")
    return [
        {
            "algorithm": name,
            "program": program,
            "seconds": median(seconds[program][1:]),
            "best_seconds": min(seconds[program][1:]),
            "relative_error": errors[program],
            "peak_megabytes": peaks[program],
        }
        for program in PROGRAMS
    ]


def reset_peak_memory() -> float:
    """Release free memory and reset the peak that the kernel counts; return the memory in use, in megabytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_memory() -> float:
    return _status("VmHWM")


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    rows = [row for name, rank in (("FedMF-64", None), ("CoLR@4", 4)) for row in measure(name, rank, arguments.repeats)]
    report = {
        "rows": rows,
        "repeats": arguments.repeats,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_average": [load_before, os.getloadavg()[0]],
    }
    _print(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))


def _print(report: dict) -> None:
    table = Table(
        "", "program", "ms/round", "x modules", "x tightest", "error", "peak MB", title="Rounds of 60 clients"
    )
    for first in range(0, len(report["rows"]), len(PROGRAMS)):
        group = report["rows"][first : first + len(PROGRAMS)]
        for row in group:
            faster = [f"{other['seconds'] / row['seconds']:.1f}" for other in group[:2]]
            error, peak = f"{row['relative_error']:.0e}", f"{row['peak_megabytes']:.0f}"
            table.add_row(row["algorithm"], row["program"], f"{1e3 * row['seconds']:.1f}", *faster, error, peak)
    Console(width=110).print(table)
    load = " to ".join(f"{value:.2f}" for value in report["load_average"])
    print(f"{report['machine']}; load average {load}; medians of {report['repeats']} rounds; 1 thread unless named")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
