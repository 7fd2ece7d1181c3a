"""Milliseconds of products on observed entries: compiled kernels, torch's, and dense ones.

`dense residual` is F (M - X Y') with whole matrices, `dense gather` the product X Y' and a selection of its entries.
torch's product is its `sampled_addmm` on the same pattern. Least of five calls.

    python benchmarks/completion_products.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from narrowcast.solves.completion_problems import SyntheticCompletion

CASES = ((1000, 0.05, 20), (1000, 0.4, 200), (10_000, 0.05, 2), (10_000, 0.05, 20), (10_000, 0.05, 200))


def least(function: Callable[[], object], calls: int = 5) -> float:
    function()
    found = []
    for _ in range(calls):
        began = time.perf_counter()
        function()
        found.append(1000 * (time.perf_counter() - began))
    return min(found)


def measured(n: int, fraction: float, rank: int) -> dict[str, float]:
    problem = SyntheticCompletion(rows=n, rank=rank, fraction=fraction).load()
    observed = problem.observed
    assert isinstance(problem.truth, tuple)
    left, right = (np.ascontiguousarray(each) for each in problem.truth)
    row, column = observed.row_of_entries(), observed.indices
    whole, mask = left @ right.T, np.zeros((n, n), dtype=bool)
    mask[row, column] = True
    pattern = torch.sparse_csr_tensor(
        torch.from_numpy(observed.indptr),
        torch.from_numpy(observed.indices.astype(np.int64)),
        torch.zeros(observed.count, dtype=torch.float64),
        size=(n, n),
    )
    torch_left, torch_right = torch.from_numpy(left), torch.from_numpy(np.ascontiguousarray(right.T))
    found = {
        "sampled": least(lambda: observed.sampled(left, right)),
        "D right": least(lambda: observed.times(observed.values, right)),
        "D' left": least(lambda: observed.transposed_times(observed.values, left)),
        "torch sampled": least(lambda: torch.sparse.sampled_addmm(pattern, torch_left, torch_right, beta=0.0)),
        "dense gather": least(lambda: (left @ right.T)[row, column], 2),
        "dense residual": least(lambda: mask * (whole - left @ right.T), 2),
    }
    return {**found, "torch / sampled": found["torch sampled"] / found["sampled"]} | {
        f"{name} / sampled": found[name] / found["sampled"] for name in ("dense gather", "dense residual")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = {f"n = {n}, {fraction:.0%}, r = {rank}": measured(n, fraction, rank) for n, fraction, rank in CASES}
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    table = Table(title=f"Milliseconds; threads {threads}, load {os.getloadavg()[0]:.1f}")
    for name in ("case", *next(iter(rows.values()))):
        table.add_column(name, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.3g}" for value in row.values()))
    Console(width=180).print(table)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
