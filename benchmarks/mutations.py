"""Mutated inputs for every parser of bytes from outside: a table of refused, accepted and undocumented errors.

python benchmarks/mutations.py [--count 2000] [--only PART_OF_NAME]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fixtures"))

from file_parsers import FILES
from mutants import campaign
from payload_parsers import PAYLOADS


def main() -> int:
    """Print a row for each parser; return 1 if any error is undocumented."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--count", type=int, default=2000)
    arguments.add_argument("--only", default="")
    given = arguments.parse_args()
    print("| parser | mutations | refused | accepted | undocumented errors | worst ms |\n|---|---|---|---|---|---|")
    undocumented: list[str] = []
    for name, parser in {**PAYLOADS, **FILES}.items():
        if given.only in name:
            with tempfile.TemporaryDirectory() as folder:
                outcome = campaign(parser, Path(folder), given.count)
            print(outcome.row(name), flush=True)
            undocumented += outcome.undocumented
    print("\n".join(undocumented), file=sys.stderr)
    return bool(undocumented)


if __name__ == "__main__":
    sys.exit(main())
