"""`narrowcast doctor`."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from narrowcast.cli.terminal import FOLDER, console
from narrowcast.platform.errors import RunFailed

_MARKS = {"ok": "ok", "note": "note", "wrong": "WRONG"}


@click.command()
@click.argument("experiment", required=False)
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@click.option(
    "--address", envvar="RAY_API_SERVER_ADDRESS", metavar="http://HEAD:8265", help="A cluster to look at too."
)
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
def doctor(experiment: str | None, overrides: tuple[str, ...], address: str | None, output: Path) -> None:
    """Check this machine, and a cluster, for all that a run needs; of EXPERIMENT, where it is given.

    Says of each thing what was found and, where it is wrong, what to do. The exit status is 1 where anything is wrong.
    """
    from narrowcast.experiment import load_experiment
    from narrowcast.runs.environment_check import diagnose

    loaded = load_experiment(experiment, overrides) if experiment is not None else None
    table = Table("what", "", "found", "what to do", box=None, pad_edge=False)
    wrong = []
    for finding in diagnose(loaded, address, output):
        table.add_row(finding.what, _MARKS[finding.verdict], finding.found, finding.advice)
        wrong += [finding.what] if finding.verdict == "wrong" else []
    console().print(table)
    if wrong:
        raise RunFailed(f"{len(wrong)} of these will stop a run: {', '.join(wrong)}")
