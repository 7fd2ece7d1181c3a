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
    default=3,
    show_default=True,
    help="Rounds to repeat from the start and from each checkpoint.",
)
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@TRUST
def verify(names: tuple[str, ...], rounds: int, output: Path, *, trust: bool) -> None:
    """Check that the files of RUN are complete and consistent, and that repeated rounds give the same results.

    \b
    narrowcast verify scolr-ml100k                 a run in the folder runs
    narrowcast verify backup/scolr-ml100k          the folder of a run
    narrowcast verify 'fedavg-*'                   all runs whose names match
    narrowcast verify scolr-ml100k --rounds 0      check the files only

    The command checks the checksums of the journal, each of which covers all lines before it, the sha256 of each
    checkpoint, and that the tables, result.json and model.safetensors agree with the journal and the last checkpoint.
    It repeats rounds in this process, from the start and from each checkpoint that was kept, and compares every number
    with the journal: bits, simulated seconds, losses and metrics of the rounds and of their clients.

    Checksums detect damage, but not a forgery with valid checksums; repeated rounds do. Nothing is written. Repeat
    rounds on the same kind of processor as that of the run, since others may round sums differently. An unfinished run
    can be verified while no process works on it. The exit status is 1 if a check fails.

    Rounds are the work of the classes and programs that the run's configuration names. Those of its own run only in
    folders that you trust (`narrowcast trust FOLDER`), or with --trust; without, only the files are checked.
    """  # noqa: D301 - click wants the character
    from narrowcast.platform.errors import RunFailed
    from narrowcast.runs.run_folder import CONFIG, find_runs

    failures = [failure for folder in find_runs(names, output, CONFIG) if (failure := _verify(folder, rounds, trust))]
    if failures:
        raise RunFailed("; ".join(failures))


def _verify(folder: Path, rounds: int, trust: bool) -> str | None:
    """Print the checks of a run; return what failed, None if nothing did."""
    from rich.table import Table
    from rich.text import Text

    from narrowcast.runs.verification import verify as checks_of

    table = Table(box=None, title=f"{folder.name}: what was checked", title_justify="left")
    for header in ("", "compared", "verdict"):
        table.add_column(header, overflow="fold")
    checks = checks_of(folder, rounds, trust=trust)
    for check in checks:
        verdict = Text(f"failed: {check.problem}", style="red") if check.problem else Text("ok")
        if check.skipped:
            verdict = Text(f"not checked: {check.skipped}", style="dim")
        table.add_row(check.subject, check.compared, verdict)
    console().print(table)
    if failed := [check for check in checks if check.problem]:
        first = f"{failed[0].subject}: {failed[0].problem}"
        return f"{folder.name}: {len(failed)} of {len(checks)} checks failed; the first is {first}"
    return None
