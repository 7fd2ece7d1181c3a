"""Wall and processor time of short commands, medians of five, each in a process of its own: run on a quiet machine.

python benchmarks/start_up.py [--ray]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOY = "data: digits\nalgorithm: fedavg\nrounds: 10\n"
REPETITIONS = 5


def measure(name: str, command: list[str], folder: Path, fresh: Path | None = None) -> None:
    """Print the median, the range and the processor time of a command; `fresh` is removed before each."""
    walls, cpus = [], []
    for _ in range(REPETITIONS):
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)
        before, began = os.times(), time.perf_counter()
        subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        walls.append(time.perf_counter() - began)
        after = os.times()
        user, system = after.children_user - before.children_user, after.children_system - before.children_system
        cpus.append(user + system)
    print(
        f"| {name} | {statistics.median(walls):.2f} ({min(walls):.2f} to {max(walls):.2f}) "
        f"| {statistics.median(cpus):.2f} |",
        flush=True,
    )


def main() -> None:
    """Measure in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", action="store_true", help="the ten rounds on a local Ray cluster too")
    chosen = parser.parse_args()
    run = [sys.executable, "-m", "narrowcast"]
    print(f"load {os.getloadavg()[0]:.1f}\n\n| command | wall time, s | processor time, s |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "toy.yaml").write_text(TOY)
        measure("`narrowcast --help`", [*run, "--help"], folder)
        measure("`import narrowcast`", [sys.executable, "-c", "import narrowcast"], folder)
        measure("ten rounds on digits, in process", [*run, "run", "toy.yaml"], folder, folder / "runs")
        subprocess.run([*run, "run", "toy.yaml", "--output", "other"], cwd=folder, capture_output=True, check=True)
        measure("`narrowcast compare` of two runs", [*run, "compare", "runs/toy", "other/toy"], folder)
        if chosen.ray:
            measure("the same rounds on Ray", [*run, "run", "toy.yaml", "--backend", "ray"], folder, folder / "runs")


if __name__ == "__main__":
    main()
