"""A table or figure of a paper from its runs to its verdicts: what is missing is played, the rest is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowcast.platform.config import suggest
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.tracking.mlflow_run import check_store
from narrowcast.platform.tracking.units import format_percent, format_seconds
from narrowcast.reproduce.paper_results import TARGETS, Target
from narrowcast.reproduce.report import as_csv, as_markdown
from narrowcast.reproduce.run_pool import Job, play_all
from narrowcast.reproduce.verdict import Verdict
from narrowcast.runs.session import writable

RUNS = "runs"


@dataclass(frozen=True)
class Reproduction:
    """What came of a target, and the files it was written to."""

    title: str
    notes: tuple[str, ...]
    verdicts: list[Verdict]
    files: list[Path]


def find_target(name: str) -> Target:
    """The target of this name, or a `UserError` that lists them."""
    if name not in TARGETS:
        raise UserError(f'no table or figure "{name}"; there are: {", ".join(TARGETS)}{suggest(name, TARGETS)}')
    return TARGETS[name]


def reproduce(
    name: str, *, seeds: int, rounds: int | None, at_once: int, output: Path, say: Callable[[str], None]
) -> Reproduction:
    """Play what is missing and judge the whole; runs are shared by all targets of the output folder."""
    target = find_target(name)
    if not target.wanted and rounds is not None:
        raise UserError(f"{name} has no rounds; leave out --rounds")
    own = next((Job(wanted, 0, None, output).experiment.rounds for wanted in target.wanted), None)
    rounds = None if rounds == own else rounds
    writable(output)
    jobs = [Job(wanted, seed, rounds, output / RUNS) for seed in range(seeds) for wanted in target.wanted]
    ended = _play_missing(jobs, 1 if target.alone else at_once, say) if jobs else {}
    results = {wanted.label: [ended[job.name] for job in jobs if job.wanted == wanted] for wanted in target.wanted}
    notes = [f"Source: {target.source}."]
    if jobs:
        notes.append(f"Ours: mean ± standard deviation over {seeds} seed{'s' * (seeds > 1)}.")
    try:
        verdicts, plots = target.finish(results, output / name)
        if rounds is not None and own is not None:
            changed = f"{'shortened' if rounds < own else 'lengthened'} to {rounds} of {own} rounds"
            verdicts = [replace(verdict, verdict=changed) for verdict in verdicts]
        title, files = f"{name}: {target.what}", [output / f"{name}.md", output / f"{name}.csv"]
        files[0].write_text(as_markdown(title, verdicts, notes))
        files[1].write_text(as_csv(verdicts))
    except OSError as error:
        raise RunFailed(f"cannot write to {output} ({error.strerror}); make room and give the same command") from error
    return Reproduction(title, tuple(notes), verdicts, [*files, *plots])


def _play_missing(jobs: list[Job], at_once: int, say: Callable[[str], None]) -> dict[str, Mapping[str, Any]]:
    jobs[0].experiment.data.load()  # missing data is one line here, not one from each process
    results = {job.name: result for job in jobs if (result := job.finished()) is not None}
    for job in jobs:
        if job.name in results:
            job.tidy()
    missing = [job for job in jobs if job.name not in results]
    if not missing:
        say(f"all {len(jobs)} runs were there already")
        return results
    say(f"{len(missing)} of {len(jobs)} runs to play, {min(at_once, len(missing))} at a time")
    writable(jobs[0].output)
    check_store(jobs[0].experiment.tracking.resolve(jobs[0].output))  # several processes must not all create it
    failed, played = [], 0

    def show(job: Job, outcome: Mapping[str, Any] | Exception) -> None:
        nonlocal played
        played += 1
        say(f"[{played}/{len(missing)}] {job.name}  {_in_short(outcome)}")
        if isinstance(outcome, Exception):
            failed.append(f"{job.name}: {outcome}")
        else:
            results[job.name] = outcome

    play_all(missing, at_once, show)
    if failed:
        raise RunFailed("; ".join(failed))
    return results


def _in_short(outcome: Mapping[str, Any] | Exception) -> str:
    if isinstance(outcome, Exception):
        return f"failed: {outcome}"
    if "final" not in outcome:
        return "measured"
    accuracy, seconds = format_percent(outcome["final"]["test.hr@10"]), format_seconds(outcome["wall_seconds"])
    return f"HR@10 {accuracy}, {seconds}"
