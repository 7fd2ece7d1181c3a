"""The best trials of a study played again, with seeds that no trial had, and measured on the test split."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from narrowcast.cluster.worker_pool import Lost, Over, Places
from narrowcast.platform.atomic_files import write_atomically
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.tracking.study_run import StudyStore, TrialRun
from narrowcast.tuning.study_file import StudyFile
from narrowcast.tuning.summary import TrialRow
from narrowcast.tuning.trial_runner import Job, Jobs

_TRIES = 3  # of a run whose worker dies


@dataclass(frozen=True)
class Retested:
    """A trial and the last evaluations of its new runs, one for each seed."""

    trial: TrialRow
    seeds: Sequence[int]
    rows: Sequence[Mapping[str, float]]

    def metric(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation (n - 1) over the seeds; NaN of a single one."""
        values = [row[name] for row in self.rows]
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")

    def means(self) -> dict[str, float]:
        """All test metrics, averaged over the seeds."""
        return {name: self.metric(name)[0] for name in self.rows[0] if name.startswith("test.")}

    def plain(self) -> dict[str, Any]:
        """As `result.json` has it."""
        return {"trial": self.trial.number, "seeds": list(self.seeds), "runs": [dict(row) for row in self.rows]}


def retest(
    file: StudyFile,
    best: Sequence[TrialRow],
    folder: Path,
    workers: Places,
    budget: Mapping[str, float],
    store: StudyStore,
) -> list[Retested]:
    """Play what is not in the folder yet; raises `RunFailed` where a run fails."""
    offsets = range(file.settings.seeds, file.settings.seeds + file.settings.retest.seeds)
    wanted = [(trial, offset) for trial in best for offset in offsets]
    paths = {key: folder / f"trial-{trial.number}-seed-{offset}.json" for key, (trial, offset) in enumerate(wanted)}
    waiting = [key for key, path in paths.items() if not path.is_file()]
    free, at, tries = list(range(file.settings.parallel)), dict[int, int](), dict[int, int]()
    while waiting or at:
        while free and waiting:
            key, place = waiting.pop(0), free.pop(0)
            trial, offset = wanted[key]
            tries[key] = tries.get(key, 0) + 1
            at[place] = key
            workers.begin(place, Jobs((Job(key, (file.build(trial.drawn, offset),), tested=True),), budget))
        found = workers.next(60.0)
        if found is None:
            continue
        place, what = found
        if isinstance(what, Over | Lost):
            key = at.pop(place)
            free.append(place)
            if isinstance(what, Lost):
                if tries[key] == _TRIES:
                    raise RunFailed(f"trial {wanted[key][0].number} on test: {what.reason}, {_TRIES} times")
                waiting.append(key)
            continue
        for step in what:
            if step.failed:
                raise RunFailed(f"trial {wanted[step.key][0].number} with another seed: {step.failed}")
            if step.over:
                row = {**(step.row or {}), "logged_at_ms": int(time.time() * 1000)}
                write_atomically(paths[step.key], json.dumps(row).encode())
        workers.answer(place, ())
    rows = {key: json.loads(path.read_text()) for key, path in paths.items()}
    known = store.states()
    for key, (trial, offset) in enumerate(wanted):
        run = _run(file, trial, offset, rows[key])
        if known.get(run.key) != run.state:
            store.put(run)
    return [
        Retested(trial, list(offsets), [rows[key] for key, (each, _) in enumerate(wanted) if each is trial])
        for trial in best
    ]


def _run(file: StudyFile, trial: TrialRow, offset: int, row: Mapping[str, Any]) -> TrialRun:
    key = f"{trial.number}-test-{offset}"
    tags = {"retest_of": str(trial.number)}
    name = f"{trial.number:03d}-test-seed-{offset}-{file.name}"
    return TrialRun(key, name, "complete", trial.drawn, tags, (row,))
