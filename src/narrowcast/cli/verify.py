"""`narrowcast verify`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from narrowcast.cli.completion import names_of_runs
from narrowcast.cli.terminal import FOLDER, TRUST, console

if TYPE_CHECKING:
    from narrowcast.runs.checks import Check
    from narrowcast.runs.repetition import Budget


@click.command()
@click.argument("names", metavar="FOLDER...", nargs=-1, required=True, shell_complete=names_of_runs)
@click.option(
    "--rounds",
    type=click.IntRange(min=0),
    help="Rounds or iterations to repeat; by default as many as took the run 20 seconds, and at least 10.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the draw of these rounds; by default another one.")
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@TRUST
def verify(names: tuple[str, ...], rounds: int | None, seed: int | None, output: Path, *, trust: bool) -> None:
    """Check that the files of a run agree and that its model has the metrics that they say; repeat some of its rounds.

    FOLDER is a run, a solve, a study or a benchmark: its name in the folder of all runs, its path, or a pattern.

    \b
    narrowcast verify scolr-ml100k                 a run in the folder runs
    narrowcast verify backup/scolr-ml100k          the folder of a run
    narrowcast verify 'fedavg-*'                   all runs whose names match
    narrowcast verify scolr-ml100k --rounds 0      repeat no rounds
    narrowcast verify my-study --rounds 1000       a study: its best trial is run again first

    \b
    checksums     of the journal, each of which covers all lines before it, and of each checkpoint
    sums          bits, times, clients and losses of rounds and of their clients
    tables        result.json and the tables against the journal; labels against config.yaml and the data
    measured      the trained model or answer, and each kept checkpoint, against the journal
    repeated      rounds from the start and from kept checkpoints: every number of the round and of its clients,
                  and the state at the next checkpoint; those repeated are drawn by chance (--seed)
    not checked   times by the wall clock, git commit, version, MLflow run, figures, and rounds that were not repeated

    Checksums detect damage. A forgery with valid checksums is found where it changes what can be computed again: the
    last line of the table says what cannot. Nothing is written. Repeat rounds on the same kind of processor as that of
    the run, since others may round sums differently. An unfinished run can be verified while no process works on it.
    The exit status is 1 if a check fails.

    Rounds are the work of the classes and programs that the run's configuration names. Those of its own run only in
    folders that you trust (`narrowcast trust FOLDER`), or with --trust; without, only the files are checked.
    """  # noqa: D301 - click wants the character
    from narrowcast.platform.errors import RunFailed
    from narrowcast.runs.repetition import Budget

    budget = Budget(rounds) if seed is None else Budget(rounds, seed=seed)
    failures = [failure for folder in _folders(names, output) if (failure := _verify(folder, budget, trust))]
    if failures:
        raise RunFailed("; ".join(failures))


def _folders(names: tuple[str, ...], output: Path) -> list[Path]:
    """Return the folders of studies and benchmarks as they are, and those of runs."""
    from narrowcast.runs.run_folder import CONFIG, find_run, find_runs

    found: dict[Path, None] = {}
    for name in names:
        folder = find_run(name, output)
        found |= dict.fromkeys([folder] if _kind(folder) else find_runs([name], output, CONFIG))
    return list(found)


def _kind(folder: Path) -> str:
    return next((name for name in ("study", "benchmark") if (folder / f"{name}.yaml").is_file()), "")


def _checks_of(folder: Path, budget: Budget) -> Iterator[Check]:
    if _kind(folder) == "study":
        from narrowcast.tuning.study_verification import verify_study

        return verify_study(folder, budget)
    if _kind(folder) == "benchmark":
        from narrowcast.benchmarking.benchmark_verification import verify_benchmark

        return verify_benchmark(folder, budget)
    from narrowcast.runs.verification import verify_folder

    return verify_folder(folder, budget)


def _verify(folder: Path, budget: Budget, trust: bool) -> str | None:
    """Print the checks of a run; return what failed, None if nothing did."""
    from rich.table import Table
    from rich.text import Text

    from narrowcast.platform.trust import looking

    table = Table(box=None, title=f"{folder.name}: what was checked", title_justify="left")
    for header in ("", "compared", "verdict"):
        table.add_column(header, overflow="fold")
    with looking(folder, trust=trust):  # so that all checks are made before it ends
        checks = list(_checks_of(folder, budget))
    for check in checks:
        verdict = Text(f"failed: {check.problem}", style="red") if check.problem else Text("ok")
        if check.skipped:
            verdict = Text(f"not checked: {check.skipped}", style="dim")
        table.add_row(Text(check.subject), Text(check.compared), verdict)
    console().print(table)
    if failed := [check for check in checks if check.problem]:
        first = f"{failed[0].subject}: {failed[0].problem}"
        made = sum(not check.skipped for check in checks)
        return f"{folder.name}: {len(failed)} of {made} checks failed; the first is {first}"
    return None
