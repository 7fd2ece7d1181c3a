"""Cost of a journal that survives power cuts: runs with and without its syncs, in pairs, at the default interval.

Each pair is one run with the syncs and one without, in alternating order. Besides the ratio of their times, which other
load on the machine moves, the time that the run itself spent in the journal's operations is measured.

    python benchmarks/journal_cost.py [--pairs 3] [--rounds 3000]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from narrowcast.platform.storage.disk import Disk, use_disk
from narrowcast.platform.storage.journal import encoded
from narrowcast.runs import session

JOURNAL = "journal.jsonl"
COST = 0.02
"""Target: what the syncs of the journal may take of a run."""


class TimedDisk(Disk):
    """The machine's disk, which measures what the main thread spends on the journal, and may leave out its syncs."""

    def __init__(self, *, synced: bool) -> None:
        self.synced, self.seconds, self.calls = synced, defaultdict[str, float](float), defaultdict[str, int](int)

    def append(self, path: Path, content: bytes) -> None:
        began = time.perf_counter()
        super().append(path, content)
        self._spent("append", path, began)

    def sync(self, path: Path) -> None:
        if path.name == JOURNAL and not self.synced:
            return
        began = time.perf_counter()
        super().sync(path)
        self._spent("sync", path, began)

    def _spent(self, operation: str, path: Path, began: float) -> None:
        if path.name == JOURNAL and threading.current_thread() is threading.main_thread():
            self.seconds[operation] += time.perf_counter() - began
            self.calls[operation] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3000)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    ratios, shares = [], []
    for pair in range(arguments.pairs):
        walls = {}
        for synced in (True, False) if pair % 2 else (False, True):
            disk = TimedDisk(synced=synced)
            walls[synced] = run_seconds(disk, arguments.rounds)
            if synced:
                shares.append(disk.seconds["sync"] / walls[True])
                per_call = {each: 1e3 * disk.seconds[each] / max(disk.calls[each], 1) for each in ("append", "sync")}
                print(f"{walls[True]:.1f} s; {dict(disk.calls)} calls; ms per call: {per_call}", flush=True)
        ratios.append(walls[True] / walls[False])
    print(f"with syncs / without: {', '.join(f'{each:.3f}' for each in ratios)}; median {median(ratios):.3f}")
    print(f"share of the run in syncs of the journal: {median(shares):.2%}, wanted {COST:.0%}")
    print(f"checksum of a line of 4 kB: {checksum_microseconds():.1f} us; load {os.getloadavg()[0]:.1f}")


def run_seconds(disk: Disk, rounds: int) -> float:
    settings = [f"rounds={rounds}", "evaluate_every=100", "tracking.system_metrics=false", "backend=local"]
    with tempfile.TemporaryDirectory(prefix="narrowcast-journal-") as output, use_disk(disk):
        (prepared,) = session.prepare_runs("fedavg-digits", settings, Path(output))
        began = time.perf_counter()
        session.run(prepared, lambda _: None)
        return time.perf_counter() - began


def checksum_microseconds() -> float:
    """Return the time to encode a line with its checksum, less that of its JSON."""
    entry = {"round": {"round": 1}, "clients": {"client": list(range(700))}}
    began = time.process_time()
    for _ in range(1000):
        encoded(entry, b"")
    ended = time.process_time()
    for _ in range(1000):
        json.dumps(entry).encode()
    return 1e3 * (2 * ended - began - time.process_time())


if __name__ == "__main__":
    main()
