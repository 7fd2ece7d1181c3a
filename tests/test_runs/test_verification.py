"""`narrowcast verify` finds each kind of damage and of tampering, and no problem in a run that is as it was written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from command_line import assert_refused, narrowcast
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.journal import encoded, locked
from narrowcast.runs.verification import verify

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # MLflow's store
NAME = "checked"
RUN = (
    *("fedavg-digits", f"name={NAME}", "rounds=6", "checkpoint_every=2", "evaluate_every=2", "data.clients=10"),
    *("clients_per_round=3", "model.hidden=[4]", "tracking.system_metrics=false", "--backend", "local"),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs")
    said = narrowcast("run", *RUN, "--output", output)
    assert said.status == 0, said.err
    return output / NAME


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / NAME))


def problems(folder: Path, rounds: int | None = None) -> dict[str, str]:
    return {check.subject: check.problem for check in verify(folder, rounds) if check.problem}


def test_a_run_that_keeps_its_first_checkpoint_is_whole(tmp_path: Path) -> None:
    said = narrowcast("run", *RUN, "rounds=2", "--output", tmp_path)
    assert said.status == 0, said.err
    checks = {check.subject: check.problem for check in verify(tmp_path / NAME, 0)}
    assert checks["checkpoint of round 0"] == checks["checkpoint of round 2"] == ""


def change_lines(folder: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    path = folder / "journal.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def forge(folder: Path, round_index: int, **values: Any) -> None:
    """Change a round in the journal and make the checksums right again."""

    def forged(lines: list[bytes]) -> list[bytes]:
        checksum, result = b"", []
        for number, line in enumerate(lines, start=1):
            entry = {key: value for key, value in json.loads(line).items() if key != "sha256"}
            if number == round_index:
                entry["round"] |= values
            line, checksum = encoded(entry, checksum)  # noqa: PLW2901
            result.append(line)
        return result

    change_lines(folder, forged)


def without_checksums(lines: list[bytes]) -> list[bytes]:
    return [line[: line.index(b', "sha256"')] + b"}\n" for line in lines]


def change_result(folder: Path, **values: Any) -> None:
    path = folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_table(path: Path, column: str, value: Any) -> None:
    table = pq.read_table(path, partitioning=None)
    place = table.column_names.index(column)
    values = [*table[column].to_pylist()[:-1], value]
    pq.write_table(table.set_column(place, column, pa.array(values, table[column].type)), path)


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def checkpoint(folder: Path, number: int) -> Path:
    return sorted((folder / "checkpoint").iterdir())[number]


def change_model(folder: Path) -> None:
    arrays = load_file(folder / "model.safetensors")
    name = sorted(arrays)[0]
    save_file(arrays | {name: arrays[name] + 1}, folder / "model.safetensors")


def test_a_run_as_it_was_written_has_no_problem(folder: Path) -> None:
    said = narrowcast("verify", NAME, "--output", folder.parent)
    assert (said.status, said.err) == (0, "")
    for subject in ("journal", "checkpoint of round 4", "rounds 1 to 4", "rounds 5 to 6", "model.safetensors"):
        assert f" {subject}  " in said.out
    assert said.out.count(" ok ") == sum(not check.skipped for check in verify(folder))
    assert "not checked: times by the wall clock, git_commit" in " ".join(said.out.split())


@pytest.mark.parametrize(
    ("tamper", "subject", "problem"),
    [
        (
            lambda run: change_lines(run, lambda lines: [*lines[:2], *lines[3:]]),
            "journal",
            "line 3: a round is missing",
        ),
        (lambda run: change_lines(run, lambda lines: lines[:-1]), "result.json", "rounds is 6, not 5"),
        (lambda run: change_lines(run, lambda lines: [*lines[:-1], lines[-1][:-9]]), "journal", "line 6 is incomplete"),
        (lambda run: flip(run / "journal.jsonl", 60), "journal", "line 1: "),
        (lambda run: forge(run, 5, loss=0.5), "rounds.parquet", "row 5: loss is "),
        (lambda run: forge(run, 5, loss=0.5), "rounds 5 to 6", "round 5: repeated, loss is "),
        (lambda run: forge(run, 5, loss=0.5), "sums", "round 5: loss is 0.5, not "),
        (lambda run: forge(run, 1, simulated_seconds=9.0), "rounds 1 to 4", "round 1: repeated, simulated_seconds is "),
        (lambda run: forge(run, 1, simulated_seconds=9.0), "sums", "round 1: simulated_seconds is not the sum"),
        (lambda run: forge(run, 3, delivered=2), "sums", "round 3: delivered is 2, not 3"),
        (lambda run: forge(run, 3, allocation_bits=8), "sums", "round 3: its bits are not the sum of its clients'"),
        (lambda run: forge(run, 4, total_uplink_bits=1), "sums", "total_uplink_bits is not the sum"),
        (lambda run: forge(run, 4, simulated_seconds=9.0), "checkpoint of round 4", "simulated_seconds is "),
        (lambda run: forge(run, 6, **{"test.accuracy": 1.0}), "result.json", "final is "),
        (lambda run: change_table(run / "rounds.parquet", "loss", 0.0), "rounds.parquet", "row 6: loss is 0.0, not "),
        (lambda run: change_table(run / "clients.parquet", "rank", 9), "clients.parquet", "row 18: rank is 9, not "),
        (lambda run: (run / "clients.parquet").unlink(), "clients.parquet", "unreadable"),
        (lambda run: flip(run / "rounds.parquet"), "rounds.parquet", "unreadable"),
        (lambda run: change_result(run, rounds=7), "result.json", "rounds is 7, not 6"),
        (lambda run: change_result(run, uplink_bits=1), "result.json", "uplink_bits is 1, not "),
        (lambda run: change_result(run, downlink_bits=1), "result.json", "downlink_bits is 1, not "),
        (lambda run: change_result(run, simulated_seconds=1.0), "result.json", "simulated_seconds is 1.0, not "),
        (lambda run: change_result(run, best={}), "result.json", "best is {}, not "),
        (lambda run: change_result(run, final={"loss": 0.1}), "result.json", 'final is {"loss": 0.1}, not '),
        (lambda run: change_result(run, seed=1), "labels", "seed is 1, not 0"),
        (lambda run: change_result(run, algorithm="mine"), "labels", 'algorithm is "mine", not "fedavg"'),
        (lambda run: change_result(run, data="imagenet"), "labels", 'data is "imagenet", not '),
        (lambda run: change_result(run, name="mine"), "labels", f"name is mine, not {NAME}"),
        (lambda run: change_result(run, baselines={"none": {"test.accuracy": 0.9}}), "baselines", "baselines is "),
        (lambda run: change_result(run, model_sha256="0" * 64), "model.safetensors", "has the model_sha256 0000"),
        (lambda run: (run / "result.json").write_text("{"), "result.json", "unreadable"),
        (change_model, "model.safetensors", "is not that of the last state"),
        (lambda run: flip(run / "model.safetensors"), "model.safetensors", "is not that of the last state"),
        (lambda run: flip(run / "model.safetensors", 9), "model.safetensors", "unreadable"),
        (lambda run: flip(checkpoint(run, 0)), "checkpoint of round 4", "have another sha256"),
    ],
)
def test_tampering_is_found(folder: Path, tamper: Callable[[Path], object], subject: str, problem: str) -> None:
    tamper(folder)
    assert problem in problems(folder).get(subject, "")


def test_a_changed_configuration_is_found(folder: Path) -> None:
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace("learning_rate: 0.1", "learning_rate: 0.2"))
    found = problems(folder)
    assert found["checkpoint of round 4"] == "its configuration is not that of config.yaml"
    assert "round 1: repeated, loss is " in found["rounds 1 to 4"]


def test_a_journal_without_checksums_has_no_intact_line(folder: Path) -> None:
    change_lines(folder, without_checksums)
    assert problems(folder)["journal"] == "line 1: it has no checksum"


def test_without_checkpoints_the_model_is_checked_by_repeating_the_run(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoint")
    assert problems(folder, rounds=6) == {}
    change_model(folder)
    assert set(problems(folder, rounds=6)) == {"model.safetensors"}


def test_without_checkpoints_the_model_itself_is_measured(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoint")
    checks = {check.subject: check for check in verify(folder, 0)}
    assert checks["model.safetensors"].compared.startswith("measured again")
    assert [check.subject for check in checks.values() if check.problem] == []
    change_model(folder)
    assert set(problems(folder, rounds=0)) == {"model.safetensors", "model_sha256"}


def test_the_rounds_to_repeat_are_drawn_and_the_rest_is_named(folder: Path) -> None:
    said = narrowcast("verify", folder, "--rounds", "3", "--seed", "7")
    assert said.status == 0, said.err
    assert "3 of 6 (50 %): 1, 5 to 6; drawn with --seed 7" in said.out
    assert "not checked: the other 3 rounds" in " ".join(said.out.split())


def test_an_unfinished_run_is_checked_as_far_as_it_is(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name not in ("config.yaml", "journal.jsonl", "checkpoint"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    said = narrowcast("verify", folder)
    assert said.status == 0, said.err
    assert "not checked: the run is not finished" in said.out


@pytest.mark.slow
def test_a_resumed_run_that_measures_otherwise_is_checked_with_what_each_round_has(tmp_path: Path) -> None:
    assert narrowcast("run", *RUN, "evaluate_clients=test", "--output", tmp_path).status == 0
    changed = ("rounds=9", "evaluate_every=3", "evaluate_clients=[test, train]", "checkpoints_kept=3")
    said = narrowcast("run", "--resume", NAME, *changed, "--output", tmp_path)
    assert said.status == 0, said.err
    assert problems(tmp_path / NAME) == problems(tmp_path / NAME, 5) == {}


def test_failed_checks_are_one_line_and_status_1(folder: Path) -> None:
    change_result(folder, uplink_bits=1)
    said = narrowcast("verify", NAME, "--output", folder.parent)
    assert_refused(said, "1 of 16 checks failed; the first is result.json: uplink_bits is 1, not ", status=1)
    assert_refused(narrowcast("verify", "nope", "--output", folder.parent), "no run at ", "give the name of a run")


def test_a_run_at_work_is_not_verified(folder: Path) -> None:
    with locked(folder), pytest.raises(UserError, match=f"another process is at work on {folder}; wait"):
        list(verify(folder))


def test_rounds_of_a_backend_that_drops_clients_are_not_repeated_and_its_models_are_measured(folder: Path) -> None:
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("kind: local", "kind: ray\n  on_failure: drop", 1))
    change_result(folder, backend="ray")
    checks = {check.subject: check for check in verify(folder)}
    assert checks["rounds"].skipped == "with backend.on_failure=drop, rounds depend on failures"
    assert [check.subject for check in checks.values() if check.problem] == []
    forge(folder, 6, **{"test.accuracy": 1.0})
    assert "test.accuracy is " in problems(folder)["model of round 6"]


@pytest.mark.slow
def test_new_keys_of_a_resumed_run_are_counted_where_the_run_sent_them(tmp_path: Path) -> None:
    everybody = ("data.clients=4", "clients_per_round=4", "model.hidden=[2]")
    words = (*RUN, *everybody, "secure.kind=paillier", "rounds=2", "checkpoints_kept=9")
    assert narrowcast("run", *words, "--output", tmp_path).status == 0
    for rounds in (4, 6):
        said = narrowcast("run", "--resume", NAME, f"rounds={rounds}", "--output", tmp_path)
        assert said.status == 0, said.err
    rows = [json.loads(line)["round"] for line in (tmp_path / NAME / "journal.jsonl").read_text().splitlines()]
    assert rows[2]["downlink_bits"] > rows[1]["downlink_bits"]  # round 3 is the first after a resume
    assert problems(tmp_path / NAME) == {}
    checkpoint(tmp_path / NAME, 1).unlink()  # now nothing says after which rounds the run was resumed but the last time
    checkpoint(tmp_path / NAME, 0).unlink()
    checks = {check.subject: check for check in verify(tmp_path / NAME)}
    assert "since new keys are sent when a run is resumed" in checks["rounds 1 to 4"].compared
    assert [check.subject for check in checks.values() if check.problem] == []
