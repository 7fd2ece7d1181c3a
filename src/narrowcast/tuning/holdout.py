"""Hold-out evaluation: the best trials run again, with seeds that no trial had, and measured on the test split."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowcast.cluster.worker_pool import RetryQueue
from narrowcast.platform.atomic_files import write_atomically
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.json_files import read_json
from narrowcast.platform.tracking.study_run import TrialRun
from narrowcast.tuning.study_client import StudyClient
from narrowcast.tuning.study_file import StudyFile
from narrowcast.tuning.study_folder import StudyFolder
from narrowcast.tuning.study_settings import metric_names
from narrowcast.tuning.trial_messages import Evaluation, TrialBatch, TrialSpec
from narrowcast.tuning.trial_record import TrialRecord


@dataclass(frozen=True)
class HoldoutEvaluation:
    """A trial and the last evaluations of its new runs, one for each seed."""

    trial: TrialRecord
    seeds: Sequence[int]
    rows: Sequence[Mapping[str, float]]

    def metric(self, name: str) -> tuple[float, float]:
        """Return the mean and the standard deviation (n - 1) over the seeds, NaN for a single seed."""
        values = [row[name] for row in self.rows]
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")

    def means(self) -> dict[str, float]:
        """Return all test metrics, averaged over the seeds; all metrics of a problem that has none of test."""
        names = metric_names(self.rows[0])
        return {name: self.metric(name)[0] for name in [each for each in names if each.startswith("test.")] or names}

    def plain(self) -> dict[str, Any]:
        """Return the plain values for `result.json`."""
        return {"trial": self.trial.number, "seeds": list(self.seeds), "runs": [dict(row) for row in self.rows]}


class HoldoutQueue(RetryQueue[TrialBatch, int]):
    """The hold-out runs that the study's folder does not have yet, as a queue for `dispatch`."""

    def __init__(self, file: StudyFile, best: Sequence[TrialRecord], folder: StudyFolder, client: StudyClient) -> None:
        self._file, self._best, self._client = file, best, client
        self._seeds = range(file.settings.seeds, file.settings.seeds + file.settings.holdout.seeds)
        self._runs = [(trial, offset) for trial in best for offset in self._seeds]
        self._paths = [folder.holdout(trial.number, offset) for trial, offset in self._runs]
        super().__init__(key for key, path in enumerate(self._paths) if not path.is_file())

    def job(self, key: int) -> TrialBatch:
        """Return a run."""
        trial, offset = self._runs[key]
        spec = TrialSpec(key, (self._file.build(trial.params, offset),), on_test=True)
        return TrialBatch((spec,), self._file.settings.budget_columns)

    def answer_to(self, message: Sequence[Evaluation]) -> list[int]:
        """Write the last evaluation of a run; raise `RunFailed` if it failed, and `UserError` for other data."""
        for each in message:
            for source, sha256 in each.data:
                self._client.check_data(source, sha256)
            if each.row is None:
                raise RunFailed(f"trial {self._runs[each.key][0].number} with another seed: {each.failed}")
            if each.is_last:
                row = {**each.row, "logged_at_ms": int(time.time() * 1000)}
                write_atomically(self._paths[each.key], json.dumps(row).encode())
        return []

    def key(self, job: TrialBatch) -> int:
        """Return the number of a run."""
        (spec,) = job.trials
        return spec.key

    def give_up(self, key: int, reason: str) -> None:
        """Raise `RunFailed`."""
        raise RunFailed(f"hold-out evaluation of trial {self._runs[key][0].number}: {reason}")

    def results(self) -> list[HoldoutEvaluation]:
        """Return the evaluations, the chosen trial's first."""
        again = "remove it, then give the same command, which repeats this evaluation"
        rows = iter([read_json(path, again) for path in self._paths])
        return [HoldoutEvaluation(trial, list(self._seeds), [next(rows) for _ in self._seeds]) for trial in self._best]

    def tracked_runs(self, results: Sequence[HoldoutEvaluation]) -> list[TrialRun]:
        """Return the runs as MLflow is to have them."""
        return [
            TrialRun(
                key=f"{each.trial.number}-test-{offset}",
                name=f"{each.trial.number:03d}-test-seed-{offset}-{self._file.name}",
                state="complete",
                params=each.trial.params,
                tags={"holdout_of": str(each.trial.number)},
                rows=(row,),
            )
            for each in results
            for offset, row in zip(each.seeds, each.rows, strict=True)
        ]
