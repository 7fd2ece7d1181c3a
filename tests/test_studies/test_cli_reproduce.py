"""`narrowcast reproduce`: real runs, interrupted and resumed, and bad input."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from child_processes import descendants
from command_line import assert_refused, narrowcast
from papers import PAPERS, targets

SECONDS = 120.0
Start = Callable[..., subprocess.Popen[str]]


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture
def start() -> Iterator[Start]:
    """Yield what starts the command in a process group of its own, which receives Ctrl-C together."""
    started: list[subprocess.Popen[str]] = []

    def of(*words: object) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "narrowcast", "reproduce", *map(str, words)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield of
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.mark.data("ml-1m")
@pytest.mark.slow
def test_an_interrupted_reproduction_resumes(start: Start, tmp_path: Path) -> None:
    words = ("colr-table4", "--seeds", 1, "--rounds", 5, "--jobs", 2, "--output", tmp_path)
    first = start(*words)
    runs, deadline = tmp_path / "runs", time.monotonic() + SECONDS
    while not list(runs.glob("*/result.json")):
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGINT)
    out, err = first.communicate(timeout=SECONDS)
    assert first.returncode == 1
    assert err.splitlines()[-1] == (
        f"narrowcast: interrupted; resume with: narrowcast reproduce colr-table4 --seeds 1 --output {tmp_path} "
        "--rounds 5 --jobs 2"
    )
    assert "Traceback" not in err
    assert out.splitlines()[0] == "6 of 6 runs to do, 2 at a time"
    finished = {path.parent.name: path.read_bytes() for path in runs.glob("*/result.json")}
    assert 1 <= len(finished) < 6

    second = start(*words)
    out, err = second.communicate(timeout=SECONDS)
    assert (second.returncode, err) == (0, "")
    assert out.splitlines()[0] == f"{6 - len(finished)} of 6 runs to do, {min(2, 6 - len(finished))} at a time"
    assert all((runs / name / "result.json").read_bytes() == content for name, content in finished.items())
    names = sorted(path.parent.name for path in runs.glob("*/result.json"))
    assert names == sorted(f"scolr-ml1m-rank-{rank}-seed-0-rounds-5" for rank in (64, 32, 16, 8, 4, 2))
    rows = rows_of(tmp_path / "colr-table4.csv")
    assert [row["what"] for row in rows[:2]] == ["HR@10, SCoLR r_g = 64", "HR@10, SCoLR r_g = 32"]
    assert {row["verdict"] for row in rows} == {"shortened to 5 of 1000 rounds"}
    assert not list(runs.glob("*/checkpoint"))
    result = json.loads((runs / names[0] / "result.json").read_text())
    shown = next(row for row in rows if row["what"] == "HR@10, SCoLR r_g = 16")
    assert shown["ours"] == f"{100 * result['final']['test.hr@10']:.2f}"
    assert (tmp_path / "colr-table4.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "colr-table4.md").read_text().startswith("# colr-table4: Table 4")

    left = runs / names[0] / "checkpoint"  # as of a run killed between writing its result and removing them
    left.mkdir()
    (left / "round-000000005.part").touch()
    assert narrowcast("reproduce", *words).out.splitlines()[0] == "all 6 runs are finished already"
    assert not left.exists()


@pytest.mark.data("ml-1m")
def test_workers_that_are_interrupted_as_they_start_say_nothing(start: Start, tmp_path: Path) -> None:
    process = start("colr-table4", "--seeds", 1, "--rounds", 5, "--jobs", 2, "--output", tmp_path)
    deadline = time.monotonic() + SECONDS
    while len(descendants("spawn_main", process.pid)) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)  # within their imports
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert err.startswith("narrowcast: interrupted; resume with:"), err
    assert len(err.splitlines()) == 1


_INTERRUPTED_WORKER = """
import multiprocessing, os, signal
from narrowcast.studies.execution import Planned, ProcessPool
from narrowcast.studies.spec import RunSpec

job = [Planned("digits", RunSpec("digits", "fedavg-digits", ("data.clients=8", "rounds=2")), 0, per_user=False)]
pool = ProcessPool(1)
pool.start(0, job)
(worker,) = multiprocessing.active_children()
os.kill(worker.pid, signal.SIGINT)
while (message := pool.next_message(1.0)) is None:
    pass
worker, (planned, (result,)) = message
print(worker, planned == job, result["rounds"])
pool.close()
"""


@pytest.mark.slow
def test_an_interrupt_is_left_to_the_process_that_a_worker_belongs_to(tmp_path: Path) -> None:
    """A terminal sends it to both; here the worker alone gets it, and goes on."""
    words = [sys.executable, "-c", _INTERRUPTED_WORKER]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("0 True 2\n", "")


@pytest.mark.data("ml-1m")
@pytest.mark.slow
def test_a_measurement_is_made_and_kept(start: Start, tmp_path: Path) -> None:
    words = ("colr-fig2", "--seeds", 1, "--rounds", 2, "--output", tmp_path)
    process = start(*words)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (0, "")
    assert "[1/1] components-fedmf-64-seed-0-rounds-2  measured" in out
    result = json.loads((tmp_path / "runs" / "components-fedmf-64-seed-0-rounds-2" / "result.json").read_text())
    assert (result["rounds"], result["round"]) == (2, [1])
    assert 1 <= result["n95"]["mean"][0] <= result["n99"]["mean"][0] <= 64
    said = narrowcast("reproduce", *words)
    assert (said.status, said.err) == (0, "")
    assert "all 1 runs are finished already" in said.out

    config = tmp_path / "runs" / "components-fedmf-64-seed-0-rounds-2" / "config.yaml"
    config.write_text(config.read_text().replace("embedding_dim: 64", "embedding_dim: 32"))
    assert_refused(narrowcast("reproduce", *words), "was run with another configuration; remove it")


def test_a_table_without_runs_is_computed(tmp_path: Path) -> None:
    said = narrowcast("reproduce", "wireless-table1", "--papers", PAPERS, "--output", tmp_path)
    assert (said.status, said.err) == (0, "")
    assert "least uplink levels" in said.out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"wireless-table1.{end}" for end in ("csv", "md", "png")
    ]
    rows = {row["what"]: row for row in rows_of(tmp_path / "wireless-table1.csv")}
    assert rows["uplink, links (2^9, 2^6, 2^14)"]["ours"] == "(2^8, 2^6)"
    assert rows["uplink, links (2^9, 2^6, 2^14)"]["verdict"] == "agrees"


def test_the_list_shows_the_time_of_each_target() -> None:
    said = narrowcast("reproduce", "--list", "--papers", PAPERS)
    assert (said.status, said.err) == (0, "")
    first = [line.split(" ")[0] for line in said.out.splitlines()[1:]]
    assert [name for name in first if name] == list(targets())
    assert "6 runs a seed" in said.out


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        ([], ["no table or figure given", "wireless-table1", "--list"]),
        (["colr-tabel4"], ['no table or figure "colr-tabel4"', 'Did you mean "colr-table4"?']),
        (["colr-table4", "--seeds", 0], ["--seeds", "0 is not in the range"]),
        (["colr-table4", "--rounds", 0], ["--rounds", "0 is not in the range"]),
        (["colr-table4", "--jobs", "many"], ["--jobs", "many"]),
        (["wireless-table1", "--rounds", 3], ["wireless-table1 has no rounds; leave out --rounds"]),
    ],
)
def test_bad_input_is_one_line(words: list[object], phrases: list[str], tmp_path: Path) -> None:
    assert_refused(narrowcast("reproduce", *words, "--papers", PAPERS, "--output", tmp_path), *phrases)


def test_missing_data_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWCAST_DATA", str(tmp_path / "empty"))
    monkeypatch.setenv("HOME", str(tmp_path))
    said = narrowcast("reproduce", "colr-table4", "--papers", PAPERS, "--output", tmp_path / "out")
    assert_refused(said, "ml-1m was not found", "narrowcast data fetch ml-1m")
