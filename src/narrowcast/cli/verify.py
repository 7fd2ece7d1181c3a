"""`narrowcast verify`."""

from __future__ import annotations

from pathlib import Path

import click

from narrowcast.cli.completion import names_of_runs
from narrowcast.cli.terminal import FOLDER, TRUST, console


@click.command()
@click.argument("names", metavar="RUN...", nargs=-1, required=True, shell_complete=names_of_runs)
@click.option(
    "--rounds",
    type=click.IntRange(min=0),
    help="Rounds or iterations to repeat; by default as many as took the run 20 seconds, and at least 10.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the draw of these rounds; by default another one.")
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@TRUST
def verify(names: tuple[str, ...], rounds: int | None, seed: int | None, output: Path, *, trust: bool) -> None:
    """Check that the files of RUN agree, that its model has the metrics that they say, and repeat some of its rounds.

    \b
    narrowcast verify scolr-ml100k                 a run in the folder runs
    narrowcast verify backup/scolr-ml100k          the folder of a run
    narrowcast verify 'fedavg-*'                   all runs whose names match
    narrowcast verify scolr-ml100k --rounds 0      repeat no rounds

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
    from narrowcast.runs.run_folder import CONFIG, find_runs

    folders = find_runs(names, output, CONFIG)
    failures = [failure for folder in folders if (failure := _verify(folder, rounds, seed, trust))]
    if failures:
        raise RunFailed("; ".join(failures))


def _verify(folder: Path, rounds: int | None, seed: int | None, trust: bool) -> str | None:
    """Print the checks of a run; return what failed, None if nothing did."""
    from rich.table import Table
    from rich.text import Text

    from narrowcast.runs.verification import verify as checks_of

    table = Table(box=None, title=f"{folder.name}: what was checked", title_justify="left")
    for header in ("", "compared", "verdict"):
        table.add_column(header, overflow="fold")
    checks = checks_of(folder, rounds, trust=trust, seed=seed)
    for check in checks:
        verdict = Text(f"failed: {check.problem}", style="red") if check.problem else Text("ok")
        if check.skipped:
            verdict = Text(f"not checked: {check.skipped}", style="dim")
        table.add_row(check.subject, check.compared, verdict)
    console().print(table)
    if failed := [check for check in checks if check.problem]:
        first = f"{failed[0].subject}: {failed[0].problem}"
        made = sum(not check.skipped for check in checks)
        return f"{folder.name}: {len(failed)} of {made} checks failed; the first is {first}"
    return None
