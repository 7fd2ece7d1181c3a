"""`narrowcast doctor`."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from narrowcast.cli.completion import experiments
from narrowcast.cli.terminal import FOLDER, TRUST, console
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.trust import looking

_MARKS = {"ok": "ok", "note": "note", "wrong": "WRONG"}


@click.command()
@click.argument("experiment", required=False, shell_complete=experiments)
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@click.option("--address", envvar="RAY_API_SERVER_ADDRESS", metavar="http://HEAD:8265", help="Also check this cluster.")
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@TRUST
def doctor(
    experiment: str | None, overrides: tuple[str, ...], address: str | None, output: Path, *, trust: bool
) -> None:
    """Check the environment: this machine, a cluster if --address is given, and what EXPERIMENT needs.

    Prints each finding, with advice for each problem. The exit status is 1 if there is a problem.
    """
    from narrowcast.experiment import load_experiment
    from narrowcast.runs.environment_check import diagnose

    with looking(Path(experiment or ".").parent, trust=trust):
        loaded = load_experiment(experiment, overrides) if experiment is not None else None
    table = Table("check", "", "found", "advice", box=None, pad_edge=False)
    wrong = []
    for finding in diagnose(loaded, address, output):
        table.add_row(finding.what, _MARKS[finding.verdict], finding.found, finding.advice)
        wrong += [finding.what] if finding.verdict == "wrong" else []
    console().print(table)
    if wrong:
        raise RunFailed(f"{len(wrong)} of these would stop a run: {', '.join(wrong)}")
