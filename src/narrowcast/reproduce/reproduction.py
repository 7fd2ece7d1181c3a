"""A table or figure of a paper: run what is missing, judge the results and write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowcast.platform.config import suggest
from narrowcast.platform.errors import RunFailed, UserError, remedy
from narrowcast.platform.tracking.mlflow_run import check_store
from narrowcast.platform.tracking.run_plots import METRICS
from narrowcast.platform.tracking.units import format_percent, format_seconds
from narrowcast.reproduce.paper_results import TARGETS, Target
from narrowcast.reproduce.report import as_csv, as_markdown
from narrowcast.reproduce.run_pool import ReproductionRun, run_all
from narrowcast.reproduce.study_targets import STUDY_TARGETS
from narrowcast.reproduce.verdict import PaperVerdict
from narrowcast.runs.run_folder import make_writable

RUNS = "runs"


@dataclass(frozen=True)
class Reproduction:
    """The verdicts on a target, and the files that they were written to."""

    title: str
    notes: tuple[str, ...]
    verdicts: list[PaperVerdict]
    files: list[Path]


def find_target(name: str) -> Target:
    """Return the target of this name; raise a `UserError` that lists the targets if there is none."""
    if name not in TARGETS:
        known = [*TARGETS, *STUDY_TARGETS]
        raise UserError(f'no table or figure "{name}"; there are: {", ".join(known)}{suggest(name, known)}')
    return TARGETS[name]


def draw_study(name: str, *, results: Path, at_once: int, seconds: float, output: Path) -> Reproduction:
    """Run what study `name` lacks, for so many seconds, and write its table and plot to `output`.

    Runs that are in the CSV files of `results` are not repeated; others are appended to those of `output`. Raise
    `UserError` for a wrong request, `RunFailed` if nothing can be drawn yet.
    """
    target = STUDY_TARGETS[name]
    make_writable(output)
    rows = target.rows(results, output, at_once, seconds)
    verdicts, plots = target.finish(rows, output / name)
    if not verdicts:
        raise RunFailed(f"{name}: too few of its runs are finished for a table; repeat the command")
    title, notes, file = f"{name}: {target.what}", (f"Source: {target.source}.", *target.notes), output / f"{name}.md"
    file.write_text(as_markdown(title, verdicts, notes))
    return Reproduction(title, notes, verdicts, [file, *plots])


def reproduce(
    name: str, *, seeds: int, rounds: int | None, at_once: int, output: Path, say: Callable[[str], None]
) -> Reproduction:
    """Run what target `name` still needs, and write its table (Markdown, CSV) and plots to `output`.

    Targets of the same output folder share their runs. `rounds` replaces the number of rounds of every run, and every
    verdict then says so. Raise `UserError` for a wrong request, `RunFailed` if a run failed or the disk is full.
    """
    target = find_target(name)
    if not target.runs and rounds is not None:
        raise UserError(f"{name} has no rounds; leave out --rounds")
    full_rounds = ReproductionRun(target.runs[0], 0, None, output).experiment.rounds if target.runs else None
    if rounds == full_rounds:
        rounds = None
    make_writable(output)
    runs = [ReproductionRun(spec, seed, rounds, output / RUNS) for seed in range(seeds) for spec in target.runs]
    by_name = _run_missing(runs, 1 if target.alone else at_once, say) if runs else {}
    results = {spec.label: [by_name[run.name] for run in runs if run.spec == spec] for spec in target.runs}
    notes = [f"Source: {target.source}."]
    if runs:
        notes.append(f"Ours: mean ± standard deviation over {seeds} seed{'s' * (seeds > 1)}.")
    notes += target.notes
    try:
        verdicts, plots = target.finish(results, output / name)
        if rounds is not None and full_rounds is not None:
            changed = f"{'shortened' if rounds < full_rounds else 'lengthened'} to {rounds} of {full_rounds} rounds"
            verdicts = [replace(verdict, verdict=changed) for verdict in verdicts]
        title, files = f"{name}: {target.what}", [output / f"{name}.md", output / f"{name}.csv"]
        files[0].write_text(as_markdown(title, verdicts, notes))
        files[1].write_text(as_csv(verdicts))
    except OSError as error:
        raise RunFailed(
            f"cannot write to {output} ({error.strerror}); {remedy(error)}, then repeat the command"
        ) from error
    return Reproduction(title, tuple(notes), verdicts, [*files, *plots])


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
