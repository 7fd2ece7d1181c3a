"""Timed runs of the systems: rows of a CSV file, and the tables of docs/benchmarks.md made from them."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

OWN = "narrowcast"
"""The row of each group to which the group's times are relative."""


@dataclass(frozen=True)
class TimedRun:
    """One run of a system.

    `workers` are the processes that train, each with one thread; `on` is what connects them. `ms` is the median round,
    and `cpu_ms` the processor time of a round in the process that trains, or 0 where others train. `busy_cores` is the
    number of cores that other work kept busy just before the run. `deviation` is the largest deviation of a parameter
    from the plain loop's, relative to the tensor's largest entry.
    """

    workload: str
    system: str
    workers: int
    on: str
    repeat: int
    ms: float
    cpu_ms: float
    busy_cores: float
    accuracy: float
    deviation: float


def read_runs(path: Path) -> list[TimedRun]:
    """Return the runs of a CSV file; none if there is no file."""
    if not path.is_file():
        return []
    kinds = {"int": int, "float": float, "str": str}
    with path.open(newline="") as file:
        return [TimedRun(**{each.name: kinds[each.type](row[each.name]) for each in fields(TimedRun)})  # type: ignore[index]
                for row in csv.DictReader(file)]  # fmt: skip


def append_run(path: Path, run: TimedRun) -> None:
    """Append a run to a CSV file, which is made with a header if it is missing."""
    new = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(each.name for each in fields(TimedRun))
        writer.writerow(f"{value:.6g}" if isinstance(value, float) else value for value in asdict(run).values())


def table(runs: Sequence[TimedRun], workload: str) -> str:
    """Return the Markdown table of a workload: systems in one process, then those with two workers."""
    header = ("system", "workers x threads", "on", "ms per round, median", "fastest to slowest run",
              "processor ms", "relative to narrowcast, same workers", "runs", "other load")  # fmt: skip
    lines = [_line(header), _line("---" for _ in header)]
    groups: dict[int, dict[str, list[TimedRun]]] = {}
    for run in runs:
        if run.workload == workload:
            groups.setdefault(run.workers, {}).setdefault(run.system, []).append(run)
    for workers, systems in sorted(groups.items()):
        own = median(run.ms for run in systems[OWN]) if OWN in systems else None
        for system, timed in systems.items():
            times, middle = [run.ms for run in timed], median(run.ms for run in timed)
            cpu = median(run.cpu_ms for run in timed)
            cells = (system, f"{workers} x 1", timed[0].on, _ms(middle), f"{_ms(min(times))} to {_ms(max(times))}",
                     _ms(cpu) if cpu else "", f"{middle / own:.2g}" if own else "", len(timed),
                     f"{median(run.busy_cores for run in timed):.1f}")  # fmt: skip
            lines.append(_line(cells))
    return "\n".join(lines)


def replace_tables(page: Path, tables: dict[str, str]) -> None:
    """Replace the text between `<!-- NAME -->` and `<!-- end of NAME -->` of a Markdown page by the table NAME."""
    text = page.read_text()
    for name, written in tables.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text, found = marked.subn(lambda match, new=written: f"{match[1]}{new}\n{match[2]}", text)  # type: ignore[misc]
        if not found:
            raise SystemExit(f"{page} has no <!-- {name} --> and <!-- end of {name} -->")
    page.write_text(text)


def _line(cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"  # type: ignore[call-overload]


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
