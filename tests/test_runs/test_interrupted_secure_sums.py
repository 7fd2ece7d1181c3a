"""A run with secure sums that is killed at any step of its protocol goes on to the result of one that was not."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from narrowcast.algorithms.secure.answered_rounds import AnsweredRounds
from narrowcast.algorithms.secure.keys import make_key_files
from narrowcast.algorithms.secure.schemes import Masked
from sampling import sampled

pytestmark = pytest.mark.slow

# `narrowcast` whose process is gone before, or after, it is answered the request with this number.
KILLED = """
import os, signal, sys
from narrowcast.algorithms.secure.key_store_process import PipedKeyStore
from narrowcast.cli.main import main

number, after, call = int(sys.argv[1]), sys.argv[2] == "after", PipedKeyStore.call

def counted(self, method, round_index, arrays):
    global number
    number -= 1
    if number == 0 and not after:
        os.kill(os.getpid(), signal.SIGKILL)
    answer = call(self, method, round_index, arrays)
    if number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer

PipedKeyStore.call = counted
sys.argv[1:] = sys.argv[3:]
main()
"""
RUN = (
    *("fedavg-digits", "rounds=4", "clients_per_round=6", "model.hidden=[4]", "training.epochs=1"),
    *("data={kind: digits, clients: 8, partition: iid}", "checkpoint_every=2", "checkpoint_seconds=600"),
    *("tracking.system_metrics=false", "backend=local"),
)
PER_ROUND = 3
"""Requests of a round of one chunk: begin, secrets, reveal; one more, public, is before the first."""


def narrowcast(*words: object, killed: tuple[int, str] | None = None) -> subprocess.CompletedProcess[str]:
    program = ["-m", "narrowcast"] if killed is None else ["-c", KILLED, *map(str, killed)]
    return subprocess.run([sys.executable, *program, *map(str, words)], capture_output=True, text=True, check=False)


def sha256_in(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["model_sha256"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    output = tmp_path_factory.mktemp("whole")
    said = narrowcast("run", *RUN, "secure=masked", "name=whole", "--output", output)
    assert said.returncode == 0, said.stderr
    return sha256_in(output / "whole")


@pytest.mark.parametrize("offline", sampled([False, True], [True]))
def test_a_kill_at_any_request_of_a_round_leaves_a_run_that_ends_as_it_would_have(
    offline: bool, whole: str, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    make_key_files(keys, Masked())
    secure = f"secure={{kind: masked, keys: {keys}}}" if offline else "secure=masked"
    third_round = 2 + 2 * PER_ROUND  # its number of a request, after a checkpoint
    for number in range(third_round, third_round + PER_ROUND):
        for moment in ("after",) if offline else ("before", "after"):
            name = f"{number}-{moment}"
            told = ("run", *RUN, secure, f"name={name}", "--output", tmp_path)
            assert narrowcast(*told, killed=(number, moment)).returncode == -signal.SIGKILL
            said = narrowcast("run", "--resume", name, "--output", tmp_path)
            assert said.returncode == 0, said.stderr
            assert sha256_in(tmp_path / name) == whole
    assert len(list((keys / "answered").iterdir())) == PER_ROUND if offline else not (keys / "answered").exists()
    assert (tmp_path / name / "answered.jsonl").exists() != offline


@pytest.mark.thorough
def test_a_kill_between_the_sums_of_a_round_leaves_a_run_that_ends_as_it_would_have(tmp_path: Path) -> None:
    sums, rule = 2, "algorithm={kind: fedavg, aggregator: {kind: geometric_median, iterations: 1}}"
    said = narrowcast("run", *RUN, rule, "secure=masked", "name=whole", "--output", tmp_path)
    assert said.returncode == 0, said.stderr
    second_sum = 2 + 2 * sums * PER_ROUND + PER_ROUND  # of the third round, after a checkpoint
    for number in (second_sum - 1, second_sum):
        name = str(number)
        told = ("run", *RUN, rule, "secure=masked", f"name={name}", "--output", tmp_path)
        assert narrowcast(*told, killed=(number, "after")).returncode == -signal.SIGKILL
        said = narrowcast("run", "--resume", name, "--output", tmp_path)
        assert said.returncode == 0, said.stderr
        assert sha256_in(tmp_path / name) == sha256_in(tmp_path / "whole")
        assert AnsweredRounds(tmp_path / name / "answered.jsonl").last == 4 * sums


def test_a_run_folder_that_is_put_back_opens_no_second_sum(whole: str, tmp_path: Path) -> None:
    """With keys offline, the clients' record is not in the folder that its server puts back."""
    keys = tmp_path / "keys"
    make_key_files(keys, Masked())
    told = ("run", *RUN, f"secure={{kind: masked, keys: {keys}}}", "name=one", "--output", tmp_path)
    assert narrowcast(*told, killed=(2 + 2 * PER_ROUND, "before")).returncode == -signal.SIGKILL
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    assert narrowcast("run", "--resume", "one", "--output", tmp_path).returncode == 0
    (record,) = (keys / "answered").iterdir()
    answered = AnsweredRounds(record)
    assert answered.last == 4
    shutil.rmtree(tmp_path / "one")
    shutil.copytree(tmp_path / "copy", tmp_path / "one")
    assert narrowcast("run", "--resume", "one", "--output", tmp_path).returncode == 0
    assert sha256_in(tmp_path / "one") == whole
    shutil.rmtree(tmp_path / "one")
    shutil.move(tmp_path / "copy", tmp_path / "one")
    lines = record.read_text().splitlines()
    of_round_3 = next(place for place, line in enumerate(lines) if '"round":3,"survivors"' in line)
    entry = json.loads(lines[of_round_3])
    entry["survivors"] = entry["survivors"][:-1]  # as if the first sum had been opened without one client
    lines[of_round_3] = json.dumps(entry, separators=(",", ":"))
    record.write_text("\n".join(lines) + "\n")
    said = narrowcast("run", "--resume", "one", "--output", tmp_path)
    assert "round 3 is repeated over the 5 clients whose sum was opened before the interruption" in said.stderr
    assert said.returncode == 1
    assert "has been sent another model in round 4" in said.stderr  # the third round's sum is another one here
    assert "Traceback" not in said.stderr


def test_the_key_process_says_nothing_if_its_run_is_killed(tmp_path: Path) -> None:
    told = ("run", *RUN, "secure=masked", "name=killed", "--output", tmp_path)
    for moment in ("before", "after"):
        said = narrowcast(*told, killed=(3, moment))
        assert said.returncode == -signal.SIGKILL
        assert "Traceback" not in said.stderr
        shutil.rmtree(tmp_path / "killed")
