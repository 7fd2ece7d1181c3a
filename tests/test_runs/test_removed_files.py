"""Files of a run that somebody removes or cuts while it runs: the run says so, and what can go on goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.runs import session
from narrowcast.runs.result import Result
from sampling import sampled

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
SETTINGS = ["name=run", "rounds=6", "checkpoint_every=2", "data.clients=10", "clients_per_round=2", "model.hidden=[4]"]


def at_round(number: int, change: Callable[[], object]) -> Callable[[Mapping[str, Any]], None]:
    return lambda row: change() if row["round"] == number else None  # type: ignore[func-returns-value]


def run(
    output: Path,
    on_round: Callable[[Mapping[str, Any]], None],
    resume: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
) -> dict[str, Any]:
    name, settings = (None, []) if resume else ("fedavg-digits", [*SETTINGS, "backend=local", *more])
    (prepared,) = session.prepare_runs(name, settings, output, resume)
    return session.run(prepared, on_round)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of a run that nobody touches."""
    return str(run(tmp_path_factory.mktemp("whole"), lambda _: None)["model_sha256"])


MASKED = ("secure=masked", "clients_per_round=6", "checkpoint_every=4")


@pytest.fixture(scope="module")
def whole_masked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same under masks."""
    return str(run(tmp_path_factory.mktemp("masked"), lambda _: None, more=MASKED)["model_sha256"])


@pytest.mark.parametrize("number", [3, 6])
@pytest.mark.parametrize(
    "change", [Path.unlink, lambda path: os.truncate(path, 700), lambda path: path.write_bytes(b"")]
)
def test_a_run_whose_journal_is_gone_ends_and_goes_on(
    number: int, change: Callable[[Path], object], tmp_path: Path, whole: str
) -> None:
    journal = tmp_path / "run" / "journal.jsonl"
    with pytest.raises(RunFailed, match=f"{journal} was .* while the run was at work; put it back if you can, then"):
        run(tmp_path, at_round(number, lambda: change(journal)))
    assert not (tmp_path / "run" / "result.json").exists()
    assert list((tmp_path / "run" / "checkpoint").iterdir())
    if number == 6:  # its checkpoints are those of rounds 4 and 6
        with pytest.raises(UserError, match=f"{journal} ends at round .*; start the run again"):
            run(tmp_path, lambda _: None, resume=("run",))
        return
    assert run(tmp_path, lambda _: None, resume=("run",))["model_sha256"] == whole
    assert Result.load(tmp_path / "run").clients["round"].nunique() == 6


def test_a_run_whose_journal_is_put_back_goes_on_from_its_checkpoint(tmp_path: Path, whole: str) -> None:
    journal, kept = tmp_path / "run" / "journal.jsonl", tmp_path / "kept"
    with pytest.raises(RunFailed, match="was removed while the run was at work"):
        run(tmp_path, at_round(5, lambda: journal.rename(kept)))
    kept.rename(journal)
    rounds: list[int] = []
    again = run(tmp_path, lambda row: rounds.append(row["round"]), resume=("run",))
    assert (again["model_sha256"], rounds) == (whole, [5, 6])


@pytest.mark.parametrize("number", [1, 6])
def test_a_configuration_that_is_gone_is_written_again(
    number: int, tmp_path: Path, whole: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = tmp_path / "run" / "config.yaml"
    contents: list[str] = []

    def remove() -> None:
        contents.append(config.read_text())
        config.unlink()

    assert run(tmp_path, at_round(number, remove))["model_sha256"] == whole
    assert f"{config} was removed, and is written again" in caplog.text
    assert [config.read_text()] == contents


def cut_after_its_first_line(path: Path) -> None:
    os.truncate(path, path.read_bytes().index(b"\n") + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "change"),
    sampled(
        [(number, change) for number in (3, 6) for change in (Path.unlink, cut_after_its_first_line)],
        [(6, Path.unlink)],
    ),
)
def test_a_run_whose_clients_record_is_gone_ends_and_repeats_no_round_without_it(
    number: int, change: Callable[[Path], object], tmp_path: Path, whole_masked: str
) -> None:
    record, kept = tmp_path / "run" / "answered.jsonl", tmp_path / "kept"

    def lose() -> None:
        kept.write_bytes(record.read_bytes())
        change(record)
        if number == 6:
            raise KeyboardInterrupt

    with pytest.raises((UserError, KeyboardInterrupt), match=f"{record} was .*put it back" if number == 3 else None):
        run(tmp_path, at_round(number, lose), more=MASKED)
    with pytest.raises(
        UserError, match=f"{record} has clients' answers up to round .*, and the run has recorded {number} r"
    ):
        run(tmp_path, lambda _: None, resume=("run",))
    record.write_bytes(kept.read_bytes())
    assert run(tmp_path, lambda _: None, resume=("run",))["model_sha256"] == whole_masked
