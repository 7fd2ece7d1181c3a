"""The kinds of tables: of recorded runs, of studies of hundreds of runs, and of measurements made one at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowcast.platform.errors import UserError
from narrowcast.runs.folder import make_writable
from narrowcast.studies.execution import Plan, Queue, work
from narrowcast.studies.results import Line, Lines, Rows, append_lines, as_text, merge, read_lines, read_rows
from narrowcast.studies.spec import Results, RunSpec
from narrowcast.studies.verdicts import PaperVerdict

if TYPE_CHECKING:
    from narrowcast.cluster.backend import RayBackend

Finished = tuple[list[PaperVerdict], list[Path]]
"""The verdicts, and the files of the plots that were drawn."""
_PLANNED_AGAIN = 100
"""Times that a plan may name a measurement that is there, with none made in between, before it waits for another."""


@dataclass(frozen=True)
class Effort:
    """Extent of a reproduction: `rounds` replaces those of recorded runs; a study ends after `seconds`, 0 at once.

    The runs of a study go to `ray`, which has `at_once` actors, or to as many processes of this machine.
    """

    seeds: int = 3
    rounds: int | None = None
    at_once: int = 1
    seconds: float = float("inf")
    ray: RayBackend | None = None


@dataclass(frozen=True)
class RecordedTable:
    """A table of runs with folders. `finish` takes their results, and a path without a suffix for its plots.

    `alone`: the runs are timed, so they run one at a time. A table without runs computes what it needs in `finish`.
    """

    finish: Callable[[Results, Path], Finished]
    runs: tuple[RunSpec, ...] = ()
    alone: bool = False

    @classmethod
    def of(
        cls,
        runs: Iterable[RunSpec],
        judge: Callable[[Results], list[PaperVerdict]],
        plot: Callable[[Results, Path], None],
        *,
        alone: bool = False,
    ) -> RecordedTable:
        """Return the table of these runs with a plot, which is drawn to a PNG file."""
        return cls(lambda results, path: _drawn(judge(results), plot, results, path), tuple(runs), alone)

    @classmethod
    def computed(
        cls,
        compute: Callable[[], tuple[Any, ...]],
        judge: Callable[..., list[PaperVerdict]],
        plot: Callable[..., None],
    ) -> RecordedTable:
        """Return a table without runs: `judge` takes what `compute` returns, and `plot` a PNG file too."""

        def finish(results: Results, path: Path) -> Finished:
            del results
            values = compute()
            return _drawn(judge(*values), lambda values, png: plot(*values, png), values, path)

        return cls(finish)


@dataclass(frozen=True)
class StudyTable:
    """A table of runs in CSV files; `plans` has the plan of each file, whose runs have seeds and rounds of their own.

    `plot` draws the rows to a PNG file.
    """

    plans: Mapping[str, Plan]
    judge: Callable[[Rows], list[PaperVerdict]]
    plot: Callable[[Rows, Path], None] | None = None

    def rows(self, results: Path, output: Path, effort: Effort) -> Rows:
        """Return the rows of both folders' files, after running what they lack for so many seconds."""
        queue = Queue(list(self.plans.values()), read_rows(dict.fromkeys([results, output])))
        if effort.seconds and next(queue.missing(), None) is not None:
            work(queue, output, effort.at_once, seconds=effort.seconds, ray=effort.ray)
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
class Measurements:
    """Measurements that are timed, so that they are made one at a time, and whose lines are in the CSV file `file`.

    `planned` yields their keys, the values of the first columns, in order; it sees the lines that there are, also those
    that were added since its last key. `measure` takes the values of a key and returns its lines, without the columns
    of the key. A measurement is finished if a line of it has a value in the last column. Numbers have so many digits.
    """

    file: str
    key: tuple[str, ...]
    values: tuple[str, ...]
    planned: Callable[[Lines], Iterable[tuple[Any, ...]]]
    measure: Callable[..., Iterable[Line]]
    digits: int = 6

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the file."""
        return (*self.key, *self.values)

    def read(self, folders: Iterable[Path]) -> Lines:
        """Return the lines in the files of these folders, once each, but for those that were cut."""
        lines = read_lines(*(folder / self.file for folder in folders))
        whole = (line for line in lines if line[self.columns[-1]] is not None)
        return list({tuple(map(line.get, self.columns)): line for line in whole}.values())

    def missing(self, lines: Lines) -> Iterator[tuple[Any, ...]]:
        """Yield the keys of measurements that the lines lack, each once.

        A plan that waits for a measurement plans it again, which ends the keys if nobody has made it meanwhile. Raise
        `UserError` if it waits for one whose lines are there, as of another version of the study.
        """
        done, asked, seen = set[tuple[str, ...]](), set[tuple[str, ...]](), 0
        since = Counter[tuple[str, ...]]()
        for key in self.planned(lines):
            if len(lines) > seen:
                since.clear()
            done |= {tuple(line[name] for name in self.key) for line in lines[seen:] if line[self.columns[-1]]}
            seen, words = len(lines), tuple(as_text(value, self.digits) for value in key)
            if words in done:
                since[words] += 1
                if since[words] > _PLANNED_AGAIN:
                    of_key = ", ".join(f"{name} {word}" for name, word in zip(self.key, words, strict=True))
                    raise UserError(
                        f"{self.file}: its lines of {of_key} are not those that the study waits for, as of another "
                        "version of it; remove them"
                    )
                continue
            if words in asked:
                return
            asked.add(words)
            yield key

    def made(self, lines: Lines, folder: Path) -> Iterator[Line]:
        """Make what the lines lack, add it to them and to the file of the folder, and yield its last line."""
        for key in self.missing(lines):
            of_key = dict(zip(self.key, key, strict=True))
            measured = [
                {name: as_text(value, self.digits) for name, value in {**of_key, **values}.items()}
                for values in self.measure(*key)
            ]
            append_lines(folder / self.file, self.columns, measured)
            lines += measured
            yield measured[-1]


@dataclass(frozen=True)
class MeasuredTable:
    """A table of measurements; `judge` and `plot` take the lines of each part."""

    parts: tuple[Measurements, ...]
    judge: Callable[..., list[PaperVerdict]]
    plot: Callable[..., None] | None = None

    def rows(self, results: Path, output: Path, effort: Effort) -> tuple[Lines, ...]:
        """Return the lines of both folders' files, after measuring what they lack for so many seconds."""
        began, folders = time.monotonic(), dict.fromkeys([results, output])
        every = tuple(part.read(folders) for part in self.parts)
        if effort.seconds:
            for part, lines in zip(self.parts, every, strict=True):
                for line in part.made(lines, output):
                    print(", ".join(f"{name} {value}" for name, value in line.items()), flush=True)
                    if time.monotonic() - began >= effort.seconds:
                        return every
        return every

    def finish(self, rows: tuple[Lines, ...], path: Path) -> Finished:
        """Return the verdicts and the plot, which is not drawn without verdicts."""
        plot = self.plot
        return _drawn(self.judge(*rows), None if plot is None else lambda rows, png: plot(*rows, png), rows, path)

    def keep(self, output: Path, results: Path) -> None:
        """Add the rows of the output folder to those of the paper."""
        make_writable(results)
        for part in self.parts:
            merge(output / part.file, results)


Table = RecordedTable | StudyTable | MeasuredTable


def _drawn(verdicts: list[PaperVerdict], plot: Callable[[Any, Path], None] | None, rows: Any, path: Path) -> Finished:
    if plot is None or not verdicts:
        return verdicts, []
    plot(rows, png := path.with_suffix(".png"))
    return verdicts, [png]
