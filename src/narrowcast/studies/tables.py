"""The kinds of tables: of recorded runs, of studies of hundreds of runs, and of measurements made one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.runs.folder import make_writable
from narrowcast.studies.execution import Plan, Queue, work
from narrowcast.studies.results import Rows, merge, read_rows
from narrowcast.studies.spec import Results, RunSpec
from narrowcast.studies.verdicts import PaperVerdict

Finished = tuple[list[PaperVerdict], list[Path]]
"""The verdicts, and the files of the plots that were drawn."""
_MEMORY_GIB = 100.0


@dataclass(frozen=True)
class RecordedTable:
    """A table of runs with folders. `finish` takes their results, and a path without a suffix for its plots.

    `alone`: the runs are timed, so they run one at a time. A table without runs computes what it needs in `finish`.
    """

    finish: Callable[[Results, Path], Finished]
    runs: tuple[RunSpec, ...] = ()
    alone: bool = False


@dataclass(frozen=True)
class StudyTable:
    """A table of runs in CSV files; `plans` has the plan of each file, whose runs have seeds and rounds of their own.

    `plot` draws the rows to a PNG file.
    """

    plans: Mapping[str, Plan]
    judge: Callable[[Rows], list[PaperVerdict]]
    plot: Callable[[Rows, Path], None] | None = None

    def rows(self, results: Path, output: Path, at_once: int, seconds: float) -> Rows:
        """Return the rows of both folders' files, after running what they lack for so many seconds."""
        queue = Queue(list(self.plans.values()), read_rows(dict.fromkeys([results, output])))
        if seconds and next(queue.missing(), None) is not None:
            work(queue, output, at_once, seconds, _MEMORY_GIB)
        return queue.rows

    def finish(self, rows: Rows, path: Path) -> Finished:
        """Return the verdicts and the plot, which is not drawn without verdicts."""
        return _drawn(self.judge(rows), self.plot, rows, path)

    def keep(self, output: Path, results: Path) -> None:
        """Add the rows of the output folder to those of the paper."""
        make_writable(results)
        for name in self.plans:
            merge(output / f"{name}.csv", results)


@dataclass(frozen=True)
class MeasuredTable:
    """A table of measurements in the CSV file `file`, which are timed and made one at a time.

    `read` returns the rows of such files. `measure_missing` makes the measurements that rows lack, appends each to a
    file and yields a line on it.
    """

    file: str
    read: Callable[[Sequence[Path]], Any]
    measure_missing: Callable[[Path, Any], Iterator[str]]
    judge: Callable[[Any], list[PaperVerdict]]
    plot: Callable[[Any, Path], None] | None = None

    def rows(self, results: Path, output: Path, at_once: int, seconds: float) -> Any:
        """Return the rows of both folders' files, after measuring what they lack for so many seconds."""
        del at_once
        began = time.monotonic()
        paths = [folder / self.file for folder in dict.fromkeys([results, output])]
        if seconds:
            for line in self.measure_missing(output / self.file, self.read(paths)):
                print(line, flush=True)
                if time.monotonic() - began >= seconds:
                    break
        return self.read(paths)

    def finish(self, rows: Any, path: Path) -> Finished:
        """Return the verdicts and the plot, which is not drawn without verdicts."""
        return _drawn(self.judge(rows), self.plot, rows, path)

    def keep(self, output: Path, results: Path) -> None:
        """Add the rows of the output folder to those of the paper."""
        make_writable(results)
        merge(output / self.file, results)


Table = RecordedTable | StudyTable | MeasuredTable


def _drawn(verdicts: list[PaperVerdict], plot: Callable[[Any, Path], None] | None, rows: Any, path: Path) -> Finished:
    if plot is None or not verdicts:
        return verdicts, []
    plot(rows, png := path.with_suffix(".png"))
    return verdicts, [png]
