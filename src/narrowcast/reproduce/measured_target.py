"""A target of `narrowcast reproduce` whose measurements are made one at a time and kept in a CSV file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.reproduce.verdict import PaperVerdict


@dataclass(frozen=True)
class MeasuredTarget:
    """A table of measurements in `file`; has what `narrowcast reproduce` asks of a study.

    `read` returns the rows of such files. `measure_missing` makes the measurements that rows lack, appends each to a
    file and yields a line on it. `plot` is None for a table alone.
    """

    what: str
    takes: str
    file: str
    read: Callable[[Sequence[Path]], Any]
    measure_missing: Callable[[Path, Any], Iterator[str]]
    judge: Callable[[Any], list[PaperVerdict]]
    plot: Callable[[Any, Path], None] | None
    notes: tuple[str, ...]
    source: str

    def rows(self, results: Path, output: Path, at_once: int, seconds: float) -> Any:
        """Return the rows of both folders' files, after measuring what they lack for so many seconds.

        Measurements are timed, and made one at a time.
        """
        del at_once
        began = time.monotonic()
        paths = [folder / self.file for folder in dict.fromkeys([results, output])]
        if seconds:
            for line in self.measure_missing(output / self.file, self.read(paths)):
                print(line, flush=True)
                if time.monotonic() - began >= seconds:
                    break
        return self.read(paths)

    def finish(self, rows: Any, path: Path) -> tuple[list[PaperVerdict], list[Path]]:
        """Return the verdicts and the plot; both are empty without rows."""
        verdicts = self.judge(rows)
        if self.plot is None or not verdicts:
            return verdicts, []
        self.plot(rows, png := path.with_suffix(".png"))
        return verdicts, [png]
