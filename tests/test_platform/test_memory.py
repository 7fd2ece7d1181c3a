"""A chunk that does not fit into memory ends the run with advice, not with a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STARVED = """
import resource, sys
import narrowcast.runs.session, torch  # before the limit, which is on all of a process's memory
from narrowcast.cli.main import main
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 600 * 2**20, -1))
main()
"""
# A hundred clients with 4,300,000 parameters each take 1.7 GB.
RUN = (
    "run",
    "fedavg-digits",
    "model.hidden=[2048,2000]",
    "rounds=1",
    "clients_per_round=100",
    "tracking.system_metrics=false",
)


@pytest.mark.slow
def test_a_chunk_that_does_not_fit_names_the_chunk_size(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARVED, *RUN, "chunk_size=100", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "round 1: not enough memory for 100 clients at once; lower chunk_size" in done.stderr
    assert "Traceback" not in done.stderr
