"""Attacks of an honest-but-curious server by mode, cohort and rounds, on MovieLens-100K; each beside a guess.

With `--repeats`, instead, those of a server that has round 1 answered twice, by twelve clients: the share of the values
of one client's update that it reads to the bit. There `before` is measured with clients that forget what they answered.

The guess names the most popular items among all other users, or the client with the most examples, or compares the
factors with those of another client. Figures go to one column of `attacks.csv`, whose other columns stay: `before` was
measured with the package of commit 5debc52, in which the public seed gave the negatives. `bound` is what docs/secure.md
publishes and the tests in tests/attacks require. `--table` prints the table of bounds for the documentation.

    python benchmarks/attacks.py [--modes masked ...] [--cohorts 5 10] [--rounds 1 5 50] [--column after] [--table]
    python benchmarks/attacks.py --repeats
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from attack_cells import MODES, READABLE, cell_experiment, measure_cell, some_users
from narrowcast.platform.rounds.state import Run
from repeated_rounds import RepeatAttacks

CSV = Path(__file__).with_suffix(".csv")
KEY = ("mode", "attack", "cohort", "rounds")
COLUMNS = (*KEY, "cases", "chance", "before", "after", "bound", "basis")
REPEATED = {
    "masked": "secure={kind: masked}",
    "masked, active": "secure={kind: masked, adversary: active}",
    "ckks": "secure={kind: ckks, bits: 16}",
}
"""The schemes whose clients are asked again."""
REPEATING = 12
"""How many clients there are."""
COHORTS, ROUNDS = (5, 10, 20, 60), (1, 5, 50)
_REPEATED_ROUND = "repeated round: "
MARGIN = {"positives": 0.06, "factors": 0.25, "single rows": 0.2}
"""How far above a measured figure its bound is: more than the largest difference between four seeds."""


def main() -> None:
    arguments = _arguments()
    logging.disable(logging.WARNING)  # rounds that are refused for too few clients are part of the experiment
    rows = read(arguments.csv)
    if arguments.table:
        print("\n".join([*table_of_bounds(rows.values()), "", *table_of_repeats(rows.values())]))
        return
    if arguments.repeats:
        for key, measured in repeats():
            rows.setdefault(key, dict.fromkeys(COLUMNS, "") | dict(zip(KEY, key, strict=True))).update(measured)
            print(*key, *measured.values(), sep=" | ")
    for mode in () if arguments.repeats else arguments.modes:
        for cohort in arguments.cohorts:
            began = time.perf_counter()
            for result in measure_cell(mode, cohort, arguments.rounds, *arguments.settings):
                key = (mode, result.attack, str(cohort), str(result.rounds))
                row = rows.setdefault(key, dict.fromkeys(COLUMNS, "") | dict(zip(KEY, key, strict=True)))
                row |= {"cases": str(result.cases), "chance": f"{result.chance:.3f}"}
                row[arguments.column] = f"{result.found:.3f}"
                print(*key, f"{result.found:.3f}", f"chance {result.chance:.3f}", f"cases {result.cases}", sep=" | ")
            print(f"{time.perf_counter() - began:.1f} s, load {os.getloadavg()[0]:.1f}")
    for row in rows.values():
        row["bound"], row["basis"] = bound(row) if row["after"] else ("", "")
    with arguments.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())


def repeats() -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Yield the key and the figures of each attack by repeated rounds."""
    data, _ = some_users(REPEATING)
    for mode, secure in REPEATED.items():
        experiment = cell_experiment("none", REPEATING, 2, secure)
        run = Run(experiment, experiment.secured_algorithm, experiment.task(data))
        with TemporaryDirectory() as folder:
            pairs = zip(
                RepeatAttacks(run, REPEATING, None).results(),
                RepeatAttacks(run, REPEATING, Path(folder)).results(),
                strict=True,
            )
            for forgotten, kept in pairs:
                assert forgotten.values == kept.values, "both are of one update"
                shares = [f"{each.read / each.values:.3f}" for each in (forgotten, kept)]
                measured = {"cases": str(kept.values), "chance": "0.000", "before": shares[0], "after": shares[1]}
                yield (mode, f"{_REPEATED_ROUND}{kept.attack}", str(REPEATING), "1"), measured


def bound(row: Mapping[str, str]) -> tuple[str, str]:
    """Return the published bound of a cell and what it rests on; empty if its cases are too few to say anything."""
    attack, found, chance, cases = row["attack"], float(row["after"]), float(row["chance"]), int(row["cases"])
    if row["mode"] in READABLE:
        return "1.00", "nothing is protected"
    if attack == "thin groups" or attack.startswith(_REPEATED_ROUND):
        return "0.00", "theory"
    if cases < 10 and not attack.startswith("positives"):
        return "", ""
    if attack == "single rows by seed":  # the guesses do not depend on the truth: no better than the largest client
        return f"{min(1.0, chance + 0.05):.2f}", "theory"
    margin = next(value for name, value in MARGIN.items() if attack.startswith(name))
    return f"{min(1.0, max(found, chance) + margin):.2f}", "measured"


def table_of_bounds(rows: Iterable[dict[str, str]]) -> list[str]:
    """Return the lines of the table of bounds: one for each mode and attack, with the bounds after each of ROUNDS."""
    bounds = {tuple(row[name] for name in KEY): row["bound"].removeprefix("0") or "–" for row in rows}
    lines = [
        "| mode | attack | " + " | ".join(f"{cohort} clients" for cohort in COHORTS) + " |",
        "|---|---|" + "--:|" * len(COHORTS),
    ]
    for mode, attack in dict.fromkeys(key[:2] for key in bounds):
        cells = [
            " / ".join(bounds.get((mode, attack, str(cohort), str(count)), "–") for count in ROUNDS)
            for cohort in COHORTS
        ]
        if mode not in READABLE and any(cell != "– / – / –" for cell in cells):
            lines.append(f"| `{mode}` | {attack} | " + " | ".join(cells) + " |")
    return lines


def table_of_repeats(rows: Iterable[dict[str, str]]) -> list[str]:
    """Return the lines of the table of repeated rounds: values that are read, before and after, by scheme."""
    found = {tuple(row[name] for name in KEY[:2]): row for row in rows if row["attack"].startswith(_REPEATED_ROUND)}
    lines = [f"| a round is answered, and then | {' | '.join(f'`{mode}`' for mode in REPEATED)} |"]
    lines.append("|---|" + "--:|" * len(REPEATED))
    for attack in dict.fromkeys(attack for _, attack in found):
        cells = []
        for mode in REPEATED:
            row = found[mode, attack]
            before, after = (round(float(row[name]) * int(row["cases"])) for name in ("before", "after"))
            cells.append(f"{before:,} to {after} of {int(row['cases']):,}")
        lines.append(f"| {attack.removeprefix(_REPEATED_ROUND)} | {' | '.join(cells)} |")
    return lines


def read(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """Return the rows of the table by mode, attack, cohort and rounds; none if the file is not there."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {tuple(row[name] for name in KEY): row for row in csv.DictReader(file, restval="")}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--cohorts", nargs="+", type=int, default=list(COHORTS))
    parser.add_argument("--rounds", nargs="+", type=int, default=list(ROUNDS))
    parser.add_argument("--settings", nargs="+", default=[], help="overrides of the experiment, such as seed=1")
    parser.add_argument("--column", choices=("before", "after"), default="after")
    parser.add_argument("--repeats", action="store_true", help="measure the attacks by repeated rounds alone")
    parser.add_argument("--table", action="store_true", help="print the table of bounds and measure nothing")
    parser.add_argument("--csv", type=Path, default=CSV)
    return parser.parse_args()


if __name__ == "__main__":
    main()
