"""A run that was killed, stopped or interrupted goes on by `--resume`, to the results of one that was not."""

from __future__ import annotations

import json
import random
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from command import Command
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.state import RunState
from narrowcast.platform.storage.checkpoint import load_checkpoint
from narrowcast.platform.storage.journal import Journal
from narrowcast.runs.prepared import prepare_resume
from narrowcast.runs.session import sync_run
from sampling import sampled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # up to three runs of 50 rounds, on a machine that may do other things
    # MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
]

ROUNDS = 50
CHECKPOINT_EVERY = 20
NAME = "scolr-ml100k"
# Ten epochs make a round last long enough to be killed in its midst.
RUN = (
    *("run", NAME, f"rounds={ROUNDS}", f"checkpoint_every={CHECKPOINT_EVERY}", "evaluate_every=25"),
    *("training.epochs=10", "tracking.system_metrics=false", "checkpoint_seconds=600"),
)
Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Command] = []

    def start(*words: object, **how: Any) -> Command:
        started.append(Command(*words, log=tmp_path / f"command-{len(started)}", **how))
        return started[-1]

    yield start
    for command in started:
        command.clean_up()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs")
    command = Command(*RUN, "--backend", "local", "--output", output, log=output / "command")
    try:
        assert command.wait() == 0, command.err
    finally:
        command.clean_up()
    return output / NAME


def assert_same_results(folder: Path, uninterrupted: Path) -> None:
    assert pq.read_table(folder / "rounds.parquet")["round"].to_pylist() == list(range(1, ROUNDS + 1))
    assert _without_wall_clock(folder).equals(_without_wall_clock(uninterrupted))
    clients = pq.read_table(folder / "clients.parquet")
    assert clients.equals(pq.read_table(uninterrupted / "clients.parquet"))
    assert clients.num_rows == ROUNDS * 60
    assert _result(folder) == _result(uninterrupted)


def _without_wall_clock(folder: Path) -> pa.Table:
    table = pq.read_table(folder / "rounds.parquet")
    return table.select([name for name in table.column_names if "wall_seconds" not in name and name != "logged_at_ms"])


def _result(folder: Path) -> dict[str, Any]:
    elsewhere = {"backend", "wall_seconds", "mlflow_run_id", "git_commit"}
    result = json.loads((folder / "result.json").read_text())
    assert len(result["model_sha256"]) == 64
    return {key: value for key, value in result.items() if key not in elsewhere}


@pytest.mark.parametrize(
    ("backend", "killed_after"),
    [
        pytest.param("local", 3, id="local-before-the-first-checkpoint"),
        pytest.param("local", random.Random(0).randint(21, 42), id="local-at-random", marks=pytest.mark.thorough),
        pytest.param("ray", 25, id="ray", marks=pytest.mark.ray),
    ],
)
def test_kill_9_and_resume_give_the_uninterrupted_results(
    tmp_path: Path, start: Start, uninterrupted: Path, backend: str, killed_after: int
) -> None:
    folder = tmp_path / NAME
    command = start(*RUN, "--backend", backend, "--output", tmp_path)
    command.wait_for_round(folder, killed_after)
    command.send(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    assert command.survivors(20) == []
    assert not (folder / "result.json").exists()
    reached = Journal.open(folder).last_step
    saved = load_checkpoint(folder / "checkpoint", RunState)[0].round_index
    assert killed_after <= reached < ROUNDS
    assert saved <= reached
    assert (saved == 0) == (killed_after < CHECKPOINT_EVERY)

    again = start("run", "--resume", NAME, "--output", tmp_path)
    assert again.wait() == 0, again.err
    assert again.survivors(30) == []
    assert_same_results(folder, uninterrupted)
    assert json.loads((folder / "result.json").read_text())["backend"] == backend


@pytest.mark.parametrize(
    ("backend", "number"),
    [
        pytest.param("local", signal.SIGINT, id="local-ctrl-c"),
        pytest.param("local", signal.SIGTERM, id="local-sigterm", marks=pytest.mark.thorough),
        pytest.param("ray", signal.SIGINT, id="ray-ctrl-c", marks=[pytest.mark.ray, pytest.mark.thorough]),
        pytest.param("ray", signal.SIGTERM, id="ray-sigterm", marks=[pytest.mark.ray, pytest.mark.thorough]),
    ],
)
def test_an_interrupted_run_says_how_to_go_on(
    tmp_path: Path, start: Start, uninterrupted: Path, backend: str, number: signal.Signals
) -> None:
    output = tmp_path / "all runs"  # the space makes the command one that needs quotes
    command = start(*RUN, "--backend", backend, "--output", output)
    command.wait_for_round(output / NAME, 23)
    command.send(number)
    assert command.wait() == 1
    (line,) = command.err.splitlines()
    words = shlex.split(line.partition("resume with: ")[2])
    assert words == ["narrowcast", "run", "--resume", NAME, "--output", str(output)]
    assert command.survivors(30) == []
    reached = Journal.open(output / NAME).last_step
    saved, *_ = load_checkpoint(output / NAME / "checkpoint", RunState)
    assert saved.round_index == reached  # no finished round is repeated
    if backend == "local":
        again = start(*words[1:])
        assert again.wait() == 0, again.err
        assert_same_results(output / NAME, uninterrupted)


LONG = ("run", "fedavg-digits", "rounds=100000", "evaluate_every=100000", "targets={}", "--backend", "local")


@pytest.mark.parametrize("seconds", sampled([0, 0.3], [0]))
@pytest.mark.parametrize("printed", ["backend local\n", "360 test samples\n"])
def test_an_interrupt_before_round_1_is_one_line(tmp_path: Path, start: Start, printed: str, seconds: float) -> None:
    command = start(*LONG, "--output", tmp_path / "runs")
    command.wait_until(lambda: printed in command.out)
    time.sleep(seconds)
    command.send(signal.SIGINT)
    assert command.wait() == 1
    line = command.err.rstrip("\n")
    assert "\n" not in line, line
    begun = (tmp_path / "runs" / "fedavg-digits").exists()
    assert line.startswith("narrowcast: interrupted; resume with: " if begun else "narrowcast: interrupted"), line
    assert command.survivors(30) == []


@pytest.mark.parametrize("seconds", sampled([0, 0.05, 0.5], [0.05]))
def test_a_second_interrupt_changes_nothing(tmp_path: Path, start: Start, seconds: float) -> None:
    command = start(*LONG, "--output", tmp_path)
    command.wait_for_round(tmp_path / "fedavg-digits", 3)
    command.send(signal.SIGINT)
    time.sleep(seconds)
    if command.process.poll() is None:
        command.send(signal.SIGINT)
    assert command.wait() == 1
    *before, line = command.err.splitlines()
    assert line.startswith("narrowcast: interrupted; resume with: narrowcast run --resume fedavg-digits --output"), line
    if before:  # it came while what is left was sent to MLflow
        assert before == [
            f"WARNING: not all of this run is in MLflow yet: narrowcast sync {tmp_path / 'fedavg-digits'}"
        ]
    assert command.survivors(30) == []
    reached = Journal.open(tmp_path / "fedavg-digits").last_step
    again = start("run", "--resume", "fedavg-digits", f"rounds={reached + 5}", "--output", tmp_path)
    assert again.wait() == 0, again.err


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.thorough])])
def test_a_closed_terminal_loses_no_finished_round(
    tmp_path: Path, start: Start, uninterrupted: Path, backend: str
) -> None:
    folder = tmp_path / NAME
    command = start(*RUN, "--backend", backend, "--output", tmp_path, terminal=True)
    command.wait_for_round(folder, 23)
    command.close_terminal()
    assert command.wait() == 1
    assert command.survivors(30) == []
    reached = Journal.open(folder).last_step
    assert 23 <= reached < ROUNDS
    assert load_checkpoint(folder / "checkpoint", RunState)[0].round_index == reached
    if backend == "local":
        again = start("run", "--resume", NAME, "--output", tmp_path)
        assert again.wait() == 0, again.err
        assert_same_results(folder, uninterrupted)


def test_a_run_that_ignores_hangups_outlives_its_terminal(tmp_path: Path, start: Start, uninterrupted: Path) -> None:
    program = (
        "-c",
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from narrowcast.cli.main import main; main()",
    )
    command = start(*RUN, "--backend", "local", "--output", tmp_path, program=program, terminal=True)
    command.wait_for_round(tmp_path / NAME, 3)
    command.close_terminal()
    assert command.wait() == 0
    assert_same_results(tmp_path / NAME, uninterrupted)


LOSES_A_SIGNAL = """
import gc, pathlib, signal, sys, threading
from narrowcast.cli.main import main

def hears():
    return getattr(signal.getsignal(signal.SIGTERM), "__name__", "") == "_stop"  # and does not hold it back

def in_a_callback(*_):
    here = threading.current_thread() is threading.main_thread()
    if here and hears() and journal.exists() and journal.read_bytes().count(b"\\n") >= 3:
        gc.callbacks.remove(in_a_callback)
        signal.raise_signal(signal.SIGTERM)

journal = pathlib.Path(sys.argv[-1], "scolr-ml100k", "journal.jsonl")
gc.callbacks.append(in_a_callback)
gc.set_threshold(20)  # so that the main thread, which allocates little while it plays, collects soon
main()
"""


def test_a_signal_that_python_loses_stops_the_run_too(tmp_path: Path, start: Start) -> None:
    """Python drops what is raised in a callback of its garbage collector, and Ray and SQLAlchemy have many."""
    command = start(*RUN, "--backend", "local", "--output", tmp_path, program=("-c", LOSES_A_SIGNAL))
    assert command.wait() == 1
    assert "Exception ignored in" in command.err
    assert command.err.splitlines()[-1].startswith("narrowcast: interrupted; resume with: narrowcast run --resume")
    assert Journal.open(tmp_path / NAME).last_step < ROUNDS


def test_a_run_at_work_is_left_alone(tmp_path: Path, start: Start, uninterrupted: Path) -> None:
    """Nobody else resumes or sends a run while a process plays it, a stopped one too."""
    folder = tmp_path / NAME
    command = start(*RUN, "--backend", "local", "--output", tmp_path)
    command.wait_for_round(folder, 3)
    command.send(signal.SIGSTOP)
    with pytest.raises(UserError, match=f"another process is at work on {folder}; wait"):
        prepare_resume(folder, None)
    with pytest.raises(UserError, match=f"another process is at work on {folder}; wait"):
        sync_run(folder, None)
    command.send(signal.SIGCONT)
    assert command.wait() == 0, command.err
    assert_same_results(folder, uninterrupted)


def test_of_two_resumes_one_is_refused(tmp_path: Path, start: Start, uninterrupted: Path) -> None:
    folder = tmp_path / NAME
    command = start(*RUN, "--backend", "local", "--output", tmp_path)
    command.wait_for_round(folder, 3)
    command.send(signal.SIGKILL)
    command.wait()
    reached = Journal.open(folder).last_step

    first = start("run", "--resume", NAME, "--output", tmp_path)
    first.wait_for_round(folder, reached + 1)
    first.send(signal.SIGSTOP)
    second = start("run", "--resume", NAME, "--output", tmp_path)
    assert second.wait() == 2
    assert second.err == f"narrowcast: another process is at work on {folder}; wait until it ends, or stop it\n"
    first.send(signal.SIGCONT)
    assert first.wait() == 0, first.err
    assert_same_results(folder, uninterrupted)
