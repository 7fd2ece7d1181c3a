"""A hundred forged folders, runs, solves, studies and benchmarks: which check of `narrowcast verify` finds each.

python benchmarks/forged_folders.py [--only run] [--output benchmarks/results/forged_folders.csv]

Each folder is verified three times: without repeating anything, with a tenth of its rounds or iterations repeated, and
with all of them. The originals have to pass each time.
"""

from __future__ import annotations

import argparse
import csv
import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fixtures"))

from forged_folders import KINDS, Kind

ROUNDS = {
    "run": {"none": 0, "a tenth": 2, "all": 1000},
    "solve": {"none": 0, "a tenth": 4, "all": 1000},
    "study": {"none": 0, "a tenth": 4, "all": 1000},
    "benchmark": {"none": 0, "a tenth": 4, "all": 1000},
}
"""`--rounds` of each verification; the run has 12 rounds, the solves 40 iterations, the study 36 rounds in all."""


def rows_of(name: str, kind: Kind, work: Path) -> list[dict[str, str]]:
    """Return a row for each forgery of a kind of folder, after one for its original."""
    original = kind.make(work)
    rows = []
    for forgery in ("", *kind.forgeries):
        with tempfile.TemporaryDirectory(dir=work) as place:
            folder = original if not forgery else kind.forged(original, forgery, Path(place))
            found = {
                f"found with {repeated} repeated": kind.found(folder, steps) for repeated, steps in ROUNDS[name].items()
            }
        checks = {column: problems[0] if problems else "" for column, problems in found.items()}
        rows.append({"folder": name, "forged": forgery or "nothing", **checks})
        print(f"{name:10} {rows[-1]['forged']:50} {list(checks.values())[-1]}", flush=True)
    return rows


def main() -> int:
    """Write the table and print how many are found; return 1 if a forged folder passes or an original does not."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", choices=list(KINDS))
    arguments.add_argument("--output", type=Path)
    given = arguments.parse_args()
    logging.disable(logging.WARNING)
    rows = []
    for name, kind in KINDS.items():
        if given.only in (None, name):
            with tempfile.TemporaryDirectory() as work:
                rows += rows_of(name, kind, Path(work))
    columns = [column for column in rows[0] if column.startswith("found")]
    forged = [row for row in rows if row["forged"] != "nothing"]
    originals = [row for row in rows if row["forged"] == "nothing"]
    found = Counter(column for row in forged for column in columns if row[column])
    for column in columns:
        print(f"{column}: {found[column]} of {len(forged)}")
    wrong = [row["folder"] for row in originals if any(row[column] for column in columns)]
    print(f"originals with a problem: {', '.join(wrong) or 'none'}")
    if given.output is not None:
        with given.output.open("w", newline="") as lines:
            writer = csv.DictWriter(lines, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return int(bool(wrong) or found[columns[-1]] < len(forged))


if __name__ == "__main__":
    sys.exit(main())
