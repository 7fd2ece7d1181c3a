"""Attacks of an honest-but-curious server by mode, cohort and rounds, on MovieLens-100K; each beside a guess.

The guess names the most popular items among all other users, or the client with the most examples, or compares the
factors with those of another client. Figures go to one column of `attacks.csv`, whose other columns stay: `before` was
measured with the package of commit 5debc52, in which the public seed gave the negatives.

    python benchmarks/attacks.py [--modes masked ...] [--cohorts 5 10 20 60] [--rounds 1 5 50] [--column after]
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import time
from pathlib import Path

from narrowcast.runs.attack_cells import MODES, measure_cell

CSV = Path(__file__).with_suffix(".csv")
KEY = ("mode", "attack", "cohort", "rounds")
COLUMNS = (*KEY, "cases", "chance", "before", "after", "bound")


def main() -> None:
    arguments = _arguments()
    logging.disable(logging.WARNING)  # rounds that are refused for too few clients are part of the experiment
    rows = _read(arguments.csv)
    for mode in arguments.modes:
        for cohort in arguments.cohorts:
            began = time.perf_counter()
            for result in measure_cell(mode, cohort, arguments.rounds, *arguments.settings):
                key = (mode, result.attack, str(cohort), str(result.rounds))
                row = rows.setdefault(key, dict.fromkeys(COLUMNS, "") | dict(zip(KEY, key, strict=True)))
                row |= {"cases": str(result.cases), "chance": f"{result.chance:.3f}"}
                row[arguments.column] = f"{result.found:.3f}"
                print(*key, f"{result.found:.3f}", f"chance {result.chance:.3f}", f"cases {result.cases}", sep=" | ")
            print(f"{time.perf_counter() - began:.1f} s, load {os.getloadavg()[0]:.1f}")
    with arguments.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())


def _read(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {tuple(row[name] for name in KEY): row for row in csv.DictReader(file)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--cohorts", nargs="+", type=int, default=[5, 10, 20, 60])
    parser.add_argument("--rounds", nargs="+", type=int, default=[1, 5, 50])
    parser.add_argument("--settings", nargs="+", default=[], help="overrides of the experiment, such as seed=1")
    parser.add_argument("--column", choices=("before", "after"), default="after")
    parser.add_argument("--csv", type=Path, default=CSV)
    return parser.parse_args()


if __name__ == "__main__":
    main()
