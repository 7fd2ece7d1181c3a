"""Mutated inputs for every parser of bytes from outside: a table of refused, accepted and undocumented errors.

python benchmarks/mutations.py [--count 2000] [--only PART_OF_NAME] [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import resource
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fixtures"))

from file_parsers import FILES
from mutants import campaign
from payload_parsers import PAYLOADS
from record_parsers import RECORDS


def main() -> int:
    """Print a row for each parser, and write it if asked; return 1 if any error is undocumented."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--count", type=int, default=2000)
    arguments.add_argument("--only", default="")
    arguments.add_argument("--csv", type=Path)
    given = arguments.parse_args()
    columns = ("parser", "mutations", "refused", "accepted", "undocumented errors", "worst ms", "peak MiB so far")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    rows: list[tuple[object, ...]] = [columns]
    undocumented: list[str] = []
    for name, parser in {**PAYLOADS, **FILES, **RECORDS}.items():
        if given.only in name:
            with tempfile.TemporaryDirectory() as folder:
                outcome = campaign(parser, Path(folder), given.count)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            rows.append((name, *outcome.counts(), round(outcome.worst_ms), peak))
            print(f"| {' | '.join(map(str, rows[-1]))} |", flush=True)
            undocumented += outcome.undocumented
            if given.csv is not None:
                with given.csv.open("w", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerows(rows)
    print("\n".join(undocumented), file=sys.stderr)
    return bool(undocumented)


if __name__ == "__main__":
    sys.exit(main())
