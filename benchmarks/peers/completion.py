"""Ratings and pictures completed by narrowcast's solvers and by those of other libraries, equally tuned.

Every method has 12 settings, of which the best on a tenth of the observed entries of seed 100 is fitted to the observed
entries of seeds 0 to 4. Ratings: ml-100k, a fifth held out. Pictures: 30 % of the pixels observed; errors are those of
the other pixels. Libraries come from a virtual environment of their own, made if it is missing. Fits that are in the
CSV file are not repeated.

    python benchmarks/peers/completion.py [--csv FILE] [--venv build/peers/completion]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import numpy as np
from completion_methods import TEST_SEEDS, TUNING_SEED, methods

from narrowcast.solves.completion_problems import Completion, ImageCompletion, RatingCompletion

HERE = Path(__file__).resolve().parent
REQUIREMENTS = ("scikit-surprise==1.1.5", "scikit-learn==1.9.1", "pandas")
"""fancyimpute 0.7.0 calls scikit-learn as versions before 1.8 took it; implicit has no ratings, only their absence."""
COLUMNS = ("data", "method", "library", "split", "seed", "settings", "rmse", "seconds", "load")
DATA: dict[str, Any] = {
    "ratings": RatingCompletion(),
    "china": ImageCompletion(picture="china"),
    "flower": ImageCompletion(picture="flower"),
}


def write_problem(problem: Completion, path: Path) -> None:
    """Write the observed entries and those to predict, ratings with their mean."""
    observed, row = problem.observed, problem.observed.row_of_entries()
    if problem.held_out is not None:
        test = problem.held_out.row, problem.held_out.column, problem.held_out.value
    else:
        assert isinstance(problem.truth, np.ndarray)
        unseen = np.ones(problem.truth.shape, dtype=bool)
        unseen[row, observed.indices] = False
        test = *np.nonzero(unseen), problem.truth[unseen]
    np.savez(
        path,
        row=row,
        column=observed.indices,
        value=observed.values + problem.offset,
        shape=(observed.rows, observed.columns),
        test_row=test[0],
        test_column=test[1],
        test_value=test[2],
    )


def python_of(library: str, folder: Path) -> str:
    """Return the interpreter that has a library."""
    if library == "narrowcast":
        return sys.executable
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--csv", type=Path, default=Path("papers/narrowcast_papers/completion/results/completion-peers.csv")
    )
    parser.add_argument("--venv", type=Path, default=Path("build/peers/completion"))
    parser.add_argument("--data", nargs="*", default=list(DATA), choices=list(DATA))
    parser.add_argument("--methods", nargs="*")
    options = parser.parse_args()
    done = set()
    if options.csv.exists():
        with options.csv.open(newline="") as file:
            done = {(row["data"], row["method"]) for row in csv.DictReader(file)}
    with tempfile.TemporaryDirectory() as folder:
        for data in options.data:
            for seed in (TUNING_SEED, *TEST_SEEDS):
                problem = DATA[data].model_copy(update={"seed": seed}).load()
                write_problem(problem, Path(folder) / f"{data}-{seed}.npz")
            for method, (library, _, _) in methods(data).items():
                if (data, method) in done or method not in (options.methods or [method]):
                    continue
                words = [python_of(library, options.venv), HERE / "completion_methods.py", method, data, folder]
                threads = {**os.environ, "OMP_NUM_THREADS": "1"}
                said = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False, env=threads)
                if said.returncode:
                    print(f"{data} {method} failed")
                    continue
                rows = [
                    {"data": data, "method": method, "library": library, **json.loads(line)}
                    for line in said.stdout.splitlines()
                ]
                write(options.csv, rows)
                tests = [row["rmse"] for row in rows if row["split"] == "test"]
                shown = f"{np.mean(tests):.4f} ± {np.std(tests, ddof=1):.4f}"
                if data != "ratings":
                    decibels = -20 * np.log10(tests)
                    shown += f", {np.mean(decibels):.2f} ± {np.std(decibels, ddof=1):.2f} dB"
                print(f"{data:8} {method:24} {shown}  {rows[-1]['settings']}", flush=True)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            load = f"{os.getloadavg()[0]:.1f}"
            writer.writerow(
                {**row, "settings": json.dumps(row["settings"]), "rmse": f"{row['rmse']:.6f}", "load": load}
            )


if __name__ == "__main__":
    main()
