"""A run is resumed from what a power cut may leave of it: the same model, and at most one checkpoint interval lost."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrowcast.platform.config.run_fields import StoreAddress
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.state import RunState
from narrowcast.platform.storage.disk import Disk, use_disk
from narrowcast.platform.storage.host import SystemClock, use_clock
from narrowcast.platform.storage.journal import Journal, read_lines
from narrowcast.platform.tracking import sender
from narrowcast.platform.tracking.sender import send_rounds
from narrowcast.runs import session
from narrowcast.runs.folder import CONFIG, has_run
from narrowcast.runs.prepared import PreparedExperiment, prepare_resume
from narrowcast.runs.session import recorded
from power_cuts import RULES, CrashState, crash_state, crash_states
from recording_disk import Operation, RecordingDisk

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # MLflow's store

NAME, ROUNDS, INTERVAL = "run", 400, 20
SETTINGS = (
    *(f"name={NAME}", f"rounds={ROUNDS}", f"checkpoint_every={INTERVAL}", "checkpoint_seconds=1e6"),
    *("evaluate_every=100", "data.clients=20", "clients_per_round=2", "model.hidden=[4]", "training.batch_size=64"),
    *("backend=local", "tracking.system_metrics=false"),
)


class SilentTime(SystemClock):
    """The clocks of this machine, and no work in the background: nothing but a checkpoint syncs the journal."""

    def run_periodically(self, *_: object) -> SilentTime:
        return self

    def wake(self) -> None:
        pass

    def close(self, _: float) -> bool:
        return True


class QuickDisk(Disk):
    """A disk without syncs, for runs that are not cut."""

    def sync(self, path: Path) -> None:
        pass


@dataclass(frozen=True)
class Recorded:
    """A run to the end, and what it did on the disk."""

    output: Path
    operations: list[Operation]
    model_sha256: str
    rows: list[dict[str, object]]

    def rounds_before(self, operation: int) -> int:
        """Return the number of rounds in the journal at this moment, synced or not."""
        journal = self.output / NAME / "journal.jsonl"
        before = self.operations[:operation]
        return sum(each.kind == "append" and each.path == journal and bool(each.content) for each in before)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    output = tmp_path_factory.mktemp("recorded")
    settings = (*SETTINGS, f"tracking.uri=sqlite:///{output.with_name('mlflow.db')}")
    disk = RecordingDisk()
    with use_disk(disk), use_clock(SilentTime()):
        (prepared,) = session.prepare_runs("fedavg-digits", settings, output)
        result = session.run(prepared, lambda _: None)
    return Recorded(output, disk.operations, result["model_sha256"], _rows(Journal.open(output / NAME)))


def _rows(journal: Journal) -> list[dict[str, object]]:
    """Return the rows without what is measured, which a repeated round measures again."""
    return [
        {name: value for name, value in row.items() if "wall_seconds" not in name and name != "logged_at_ms"}
        for row in journal.rounds
    ]


def prepared_from(state: CrashState, output: Path) -> PreparedExperiment | None:
    """Return the run that is resumed from a state, None if it had not begun."""
    output.mkdir()
    state.write(output)
    folder = output / NAME
    if not (folder / CONFIG).exists():
        assert not has_run(folder)
        assert not folder.exists()  # so that the same command begins it under the same name
        return None
    return prepare_resume(folder, None)


def played(prepared: PreparedExperiment) -> RunState:
    """Run to the end but for the outputs; return the last state."""
    with recorded(prepared, lambda _: None) as recorder:
        for outcome in prepared.experiment.backend.run(prepared.run, prepared.state):
            recorder.write(outcome)
    return recorder.state


def assert_it_resumes(run: Recorded, state: CrashState, output: Path) -> None:
    with use_disk(QuickDisk()), use_clock(SilentTime()):
        prepared = prepared_from(state, output)
        if prepared is None:
            assert run.rounds_before(state.after) == 0
            return
        assert run.rounds_before(state.after) - prepared.state.round_index <= INTERVAL
        assert model_sha256(prepared.experiment.algorithm, played(prepared)) == run.model_sha256
    assert _rows(Journal.open(output / NAME)) == run.rows


@pytest.mark.parametrize(("rule", "share"), list(zip(RULES, np.linspace(0.3, 0.95, len(RULES)), strict=True)))
def test_a_run_resumes_from_what_a_power_cut_left(tmp_path: Path, run: Recorded, rule: str, share: float) -> None:
    state = crash_state(run.operations, run.output, int(share * len(run.operations)), rule)
    assert_it_resumes(run, state, tmp_path / "runs")


@pytest.mark.slow
def test_a_run_resumes_from_a_cut_at_each_step_before_its_first_round(tmp_path: Path, run: Recorded) -> None:
    first = next(place for place in range(len(run.operations)) if run.rounds_before(place))
    begun = Counter[bool]()
    for after in range(first + 1):
        for rule in ("names without data", "anything"):
            with use_disk(QuickDisk()):
                prepared = prepared_from(
                    crash_state(run.operations, run.output, after, rule), tmp_path / f"{after} {rule}"
                )
            assert prepared is None or prepared.state.round_index == 0
            begun[prepared is not None] += 1
    assert min(begun[True], begun[False]) > 10


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_resumes_from_100_states(tmp_path: Path, run: Recorded) -> None:
    states = crash_states(run.operations, run.output, 100)
    assert len(states) == 100
    for number, state in enumerate(states):
        assert_it_resumes(run, state, tmp_path / str(number))


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_the_states_find_a_journal_that_is_not_synced(tmp_path: Path, run: Recorded, share: float) -> None:
    """Without the syncs of the journal, a power cut loses the run."""
    journal = run.output / NAME / "journal.jsonl"
    unsynced = [each for each in run.operations if not (each.kind == "sync" and each.path == journal)]
    state = crash_state(unsynced, run.output, int(share * len(unsynced)), "only what was synced")
    with use_disk(QuickDisk()), pytest.raises(UserError, match=r"ends at round 0, before the checkpoints in .*; start"):
        prepared_from(state, tmp_path / "runs")


@pytest.mark.slow
def test_what_mlflow_has_is_in_the_journal_and_what_the_cursor_counts_is_in_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a round that is sent again has its first time stamp, under which the store has it once; none is left out."""
    disk, sent = RecordingDisk(), [(0, 0)]

    def send(store: StoreAddress, run_id: str, rows: Sequence[Mapping[str, Any]]) -> int:
        before = len(disk.operations)
        count = send_rounds(store, run_id, rows)
        sent.append((before, rows[count - 1]["round"]))
        return count

    monkeypatch.setattr(sender, "send_rounds", send)
    output = tmp_path / "runs"
    output.mkdir()
    with use_disk(disk):
        (prepared,) = session.prepare_runs("fedavg-digits", (*SETTINGS, "rounds=60"), output)
        played(prepared)
    assert len(sent) > 3
    for after in range(0, len(disk.operations), 3):
        stored = max(last for before, last in sent if before <= after)
        files = dict(crash_state(disk.operations, output, after, "only what was synced").files)
        assert len(read_lines(io.BytesIO(files.get(f"{NAME}/journal.jsonl") or b"")).rows) >= stored
        if cursor := files.get(f"{NAME}/tracking.json"):
            assert json.loads(cursor)["sent_rounds"] <= stored
