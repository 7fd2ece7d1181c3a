"""A table or figure of a paper: run what is missing, judge the results and write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.tracking.figures import METRICS
from narrowcast.platform.tracking.sender import check_store
from narrowcast.platform.tracking.units import format_percent, format_seconds
from narrowcast.runs.folder import make_writable
from narrowcast.studies.recorded import ReproductionRun, run_all
from narrowcast.studies.tables import Effort, MeasuredTable, RecordedTable, StudyTable
from narrowcast.studies.targets import Target
from narrowcast.studies.verdicts import PaperVerdict, as_csv, as_markdown

RUNS = "runs"


@dataclass(frozen=True)
class Reproduction:
    """The verdicts on a target, and the files that they were written to."""

    title: str
    notes: tuple[str, ...]
    verdicts: list[PaperVerdict]
    files: list[Path]


def draw_study(
    target: Target, table: StudyTable | MeasuredTable, effort: Effort, *, results: Path, output: Path
) -> Reproduction:
    """Run what a study lacks, for so many seconds, and write its table and plot to `output`.

    Runs that are in the CSV files of `results` are not repeated; others are appended to those of `output`. Raise
    `UserError` for a wrong request, `RunFailed` if nothing can be drawn yet.
    """
    if effort.rounds is not None:
        raise UserError(f"{target.name} has rounds of its own; leave out --rounds")
    if effort.ray is not None and isinstance(table, MeasuredTable):
        raise UserError(f"{target.name} has measurements that are timed on this machine; leave out --backend ray")
    if effort.ray is not None and effort.seconds:
        effort.ray.check_workers("--jobs")
    make_writable(output)
    rows: Any = table.rows(results, output, effort)
    verdicts, plots = table.finish(rows, output / target.name)
    if not verdicts:
        raise RunFailed(
            f"{target.name}: too few of its runs are finished for a table, in {results} and {output}; "
            "give more time with --time-limit, or the folder of their CSV files with --results"
        )
    (file := output / f"{target.name}.md").write_text(as_markdown(target.title, verdicts, target.notes))
    return Reproduction(target.title, target.notes, verdicts, [file, *plots])


def run_recorded(
    target: Target, table: RecordedTable, effort: Effort, *, output: Path, say: Callable[[str], None]
) -> Reproduction:
    """Run what the target still needs, and write its table (Markdown, CSV) and plots to `output`.

    Targets of the same output folder share their runs. If the number of rounds is replaced, every verdict says so.
    Raise `UserError` for a wrong request, `RunFailed` if a run failed or the disk is full.
    """
    seeds, rounds = effort.seeds, effort.rounds
    if effort.ray is not None:
        raise UserError(f"{target.name} has runs with folders on this machine; leave out --backend ray")
    if not table.runs and rounds is not None:
        raise UserError(f"{target.name} has no rounds; leave out --rounds")
    full_rounds = ReproductionRun(table.runs[0], 0, None, output).experiment.rounds if table.runs else None
    if rounds == full_rounds:
        rounds = None
    make_writable(output)
    runs = [ReproductionRun(spec, seed, rounds, output / RUNS) for seed in range(seeds) for spec in table.runs]
    by_name = _run_missing(runs, 1 if table.alone else effort.at_once, say) if runs else {}
    results = {spec.label: [by_name[run.name] for run in runs if run.spec == spec] for spec in table.runs}
    source, *remarks = target.notes
    means = f"Ours: mean ± standard deviation over {seeds} seed{'s' * (seeds > 1)}."
    notes = (source, *([means] if runs else []), *remarks)
    try:
        verdicts, plots = table.finish(results, output / target.name)
        if rounds is not None and full_rounds is not None:
            changed = f"{'shortened' if rounds < full_rounds else 'lengthened'} to {rounds} of {full_rounds} rounds"
            verdicts = [replace(verdict, verdict=changed) for verdict in verdicts]
        files = [output / f"{target.name}.md", output / f"{target.name}.csv"]
        files[0].write_text(as_markdown(target.title, verdicts, notes))
        files[1].write_text(as_csv(verdicts))
    except OSError as error:
        raise RunFailed(
            f"cannot write to {output} ({error.strerror}); free some space, then repeat the command"
        ) from error
    return Reproduction(target.title, notes, verdicts, [*files, *plots])


def _run_missing(
    runs: Sequence[ReproductionRun], at_once: int, say: Callable[[str], None]
) -> dict[str, Mapping[str, Any]]:
    """Return the result of every run by its name, running those that are not finished."""
    runs[0].experiment.data_source.load()  # missing data is one line here, not one from each process
    results = {run.name: result for run in runs if (result := run.finished()) is not None}
    for run in runs:
        if run.name in results:
            run.tidy()
    missing = [run for run in runs if run.name not in results]
    if not missing:
        say(f"all {len(runs)} runs are finished already")
        return results
    say(f"{len(missing)} of {len(runs)} runs to do, {min(at_once, len(missing))} at a time")
    make_writable(runs[0].output)
    check_store(runs[0].experiment.tracking.resolve(runs[0].output))  # several processes must not all create it
    failed: list[str] = []
    ended = 0

    def show(run: ReproductionRun, outcome: Mapping[str, Any] | Exception) -> None:
        nonlocal ended
        ended += 1
        say(f"[{ended}/{len(missing)}] {run.name}  {in_short(outcome)}")
        if isinstance(outcome, Exception):
            failed.append(f"{run.name}: {outcome}")
        else:
            results[run.name] = outcome

    run_all(missing, at_once, show)
    if failed:
        raise RunFailed("; ".join(failed))
    return results


def in_short(outcome: Mapping[str, Any] | Exception) -> str:
    """Describe a run in a few words: its first test metric and wall time, or why it failed."""
    if isinstance(outcome, Exception):
        return f"failed: {outcome}"
    if "final" not in outcome:
        return "measured"
    final, seconds = outcome["final"], format_seconds(outcome["wall_seconds"])
    metric = next((metric for metric in METRICS if f"test.{metric}" in final), None)
    return seconds if metric is None else f"{METRICS[metric][0]} {format_percent(final[f'test.{metric}'])}, {seconds}"
