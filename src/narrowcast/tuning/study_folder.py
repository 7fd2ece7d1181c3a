"""The files of a study: its table and results, a folder for each trial, and its hold-out evaluations."""

from __future__ import annotations

import csv
import io
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from narrowcast.platform import plugins
from narrowcast.platform.atomic_files import write_atomically
from narrowcast.platform.config import PLUGINS, write_yaml
from narrowcast.platform.links import own_files
from narrowcast.platform.tracking.journal import AtWork, locked
from narrowcast.runs.run_folder import CONFIG, RESULT
from narrowcast.tuning.trial_record import TrialRecord

logger = logging.getLogger(__name__)
FILE, JOURNAL, TABLE, BEST = "study.yaml", "study.journal", "trials.csv", "best.yaml"
_CLOSING, _POLL_SECONDS = "closing.lock", 0.2


@dataclass(frozen=True)
class StudyFolder:
    """The folder OUTPUT/NAME of a study."""

    path: Path

    @contextmanager
    def closing(self, observe: Callable[[str], None]) -> Iterator[None]:
        """Wait until no other process of the study writes its result, and keep others waiting within the block.

        The last one then has all trials. `observe` is told if it has to wait.
        """
        with ExitStack() as stack:
            for attempt in count():
                try:
                    stack.enter_context(locked(self.path, _CLOSING))
                    break
                except AtWork:
                    if not attempt:
                        observe("another process is writing the study's result; waiting for it")
                    time.sleep(_POLL_SECONDS)
            yield

    def write_yaml(self, name: str, values: Mapping[str, Any]) -> Path:
        """Write nested plain values atomically, and the modules of the user's own classes; return the file's path."""
        path, text = self.path / name, io.StringIO()
        write_yaml(values, text)
        plugins.keep(values, path.parent / PLUGINS)
        write_atomically(path, text.getvalue().encode())
        return path

    def write_json(self, name: str, values: Any) -> None:
        """Write plain values atomically as JSON."""
        write_atomically(self.path / name, json.dumps(values, indent=2).encode())

    def write_trial(
        self, trial: TrialRecord, config: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], digests: Sequence[str]
    ) -> None:
        """Write the config that repeats the trial with `narrowcast run`, its evaluations, and its result."""
        folder = of_trial(trial.number)
        self.write_yaml(f"{folder}/{CONFIG}", config)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        write_atomically(self.path / folder / "rounds.jsonl", lines.encode())
        self.write_json(f"{folder}/{RESULT}", {**trial_entries(trial), "model_sha256": list(digests)})

    def read_rounds(self, number: int) -> tuple[Mapping[str, Any], ...]:
        """Return the evaluations of a trial; none if another machine's folder has them, or if they are damaged."""
        path = self.path / of_trial(number) / "rounds.jsonl"
        try:
            rows = tuple(map(json.loads, path.read_text().splitlines()))
            if all(isinstance(row["round"], int) and isinstance(row["logged_at_ms"], int) for row in rows):
                return rows
            damage = "no rounds"
        except OSError:
            return ()
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            damage = str(error)
        logger.warning("%s is damaged (%s); the trial is taken to have no rounds", path, damage)
        return ()

    def write_table(self, trials: Sequence[TrialRecord], paths: Iterable[str]) -> Path:
        """Write `trials.csv`; return its path."""
        write_atomically(self.path / TABLE, table_text(trials, paths).encode())
        return self.path / TABLE

    def holdout(self, number: int, offset: int) -> Path:
        """Return the file of a trial's hold-out evaluation with the seed so many above the experiment's."""
        return self.path / "holdout" / f"trial-{number}-seed-{offset}.json"

    def artifacts(self) -> Iterator[tuple[Path, str | None]]:
        """Yield what goes to MLflow, with its folder: all but the trials, which have their runs, and the journal."""
        for path in own_files(self.path):
            place = path.relative_to(self.path)
            if place.parts[0] not in ("trials", JOURNAL, _CLOSING) and path.suffix != ".part":
                yield path, None if len(place.parts) == 1 else place.parent.as_posix()


def trial_entries(trial: TrialRecord) -> dict[str, Any]:
    """Return the entries of a trial's `result.json`, but for the sha256 of its models."""
    return {
        "trial": trial.number,
        "state": trial.state,
        "values": trial.params,
        "amounts": dict(trial.metrics),
        "rounds": trial.rounds,
        "feasible": trial.feasible,
        "reason": trial.reason,
        "retry_of": trial.retry_of,
    }


def table_text(trials: Sequence[TrialRecord], paths: Iterable[str]) -> str:
    """Return the trials as CSV, with a column for each dimension's path and each metric."""
    paths = list(paths)
    metrics = list(dict.fromkeys(name for trial in trials for name in trial.metrics))
    columns = ("trial", "state", "rounds", "feasible", "wall_seconds", "retry_of", "reason")
    writer = csv.writer(stream := io.StringIO(newline=""))
    writer.writerow([*columns, *paths, *metrics])
    for trial in trials:
        row: list[Any] = [trial.number, trial.state, trial.rounds, trial.feasible, round(trial.wall_seconds, 3)]
        row += ["" if trial.retry_of is None else trial.retry_of, trial.reason]
        row += [trial.params.get(path, "") for path in paths]
        writer.writerow([*row, *(trial.metrics.get(name, "") for name in metrics)])
    return stream.getvalue()


def of_trial(number: int) -> str:
    """Return the place of a trial's files in the folder of its study."""
    return f"trials/{number:05d}"
