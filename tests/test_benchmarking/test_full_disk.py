"""Benchmarks and studies whose files cannot be written, by the system's own limit: one line, and both go on."""

from __future__ import annotations

import csv
import json
import os
import resource
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import pytest

from narrowcast.benchmarking.file import ENDS, BenchmarkFolder, load_benchmark
from studies import EXPERIMENT, ONE_OBJECTIVE, RATES, trials, write_study

TOO_LARGE = (
    "([Errno 27] File too large); raise the limit for the size of a file (ulimit -f), then give the same command, "
    "which goes on\n"
)
BENCHMARK = """
problems: {wide: {kind: synthetic_completion, rows: 3000, rank: 40, fraction: 0.05}}
solvers: {scaled_asd: scaled_asd, asd: asd}
solve: {iterations: 2}
"""


def narrowcast(*words: object, most_bytes: int = resource.RLIM_INFINITY) -> subprocess.CompletedProcess[str]:
    """Run a command that may write files of so many bytes at most."""
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    command = [sys.executable, "-m", "narrowcast", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit, timeout=280)


def states(folder: Path) -> list[str]:
    with (folder / "instances.csv").open(newline="") as lines:
        return [row["state"] for row in csv.DictReader(lines)]


@pytest.mark.slow
def test_a_disk_that_takes_no_checkpoint_ends_a_benchmark_and_no_instance(tmp_path: Path) -> None:
    file, folder = tmp_path / "wide.yaml", tmp_path / "wide"
    file.write_text(BENCHMARK)
    words = ("benchmark", file, "--output", tmp_path)
    said = narrowcast(*words, most_bytes=1_500_000)
    first = folder / "wide.scaled_asd.seed-0"
    assert said.returncode == 1
    assert said.stderr.endswith(f"narrowcast: {first} cannot be written {TOO_LARGE}")
    assert "Traceback" not in said.stderr
    assert states(folder) == ["waiting", "waiting"]
    again = narrowcast(*words)
    assert (again.returncode, states(folder)) == (0, ["finished", "finished"]), again.stderr


@pytest.mark.thorough
@pytest.mark.slow
def test_a_disk_that_takes_no_figures_ends_a_study_in_one_line(tmp_path: Path) -> None:
    words = ("tune", write_study(tmp_path, EXPERIMENT + ONE_OBJECTIVE.replace("6", "2") + RATES), "--output", tmp_path)
    said = narrowcast(*words, most_bytes=2_000_000)  # the page of figures has a library of 4 MB
    folder = tmp_path / "digits"
    assert said.returncode == 1
    assert said.stderr.splitlines()[-1] + "\n" == f"narrowcast: cannot write to {folder} {TOO_LARGE}"
    assert "Traceback" not in said.stderr
    assert not list(folder.rglob("*.part"))
    again = narrowcast(*words)
    assert again.returncode == 0, again.stderr
    assert [row["state"] for row in trials(folder)] == ["complete", "complete"]
    assert (folder / "plots" / "study.html").stat().st_size > 2_000_000


def test_a_line_after_one_that_a_full_disk_cut_is_whole(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(BENCHMARK)
    instances = load_benchmark(str(tmp_path / "b.yaml")).instances
    folder = BenchmarkFolder(tmp_path)
    folder.note(instances[0], "finished")
    line = json.dumps({"instance": instances[1].name, "state": "finished"})
    with (tmp_path / ENDS).open("a") as file:
        file.write(line[:-5])
    folder.note(instances[1], "failed", "why")
    assert [folder.states()[each.name]["state"] for each in instances] == ["finished", "failed"]


def test_a_line_is_added_without_reading_those_before_it(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(BENCHMARK)
    (instance, *_) = load_benchmark(str(tmp_path / "b.yaml")).instances
    folder, size = BenchmarkFolder(tmp_path), 2**28
    (tmp_path / ENDS).touch()
    os.truncate(tmp_path / ENDS, size)
    tracemalloc.start()
    try:
        folder.note(instance, "finished")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    with (tmp_path / ENDS).open("rb") as file:
        file.seek(size)
        first, line = file.read().split(b"\n", 1)
    assert first == b""
    assert json.loads(line)["instance"] == instance.name
