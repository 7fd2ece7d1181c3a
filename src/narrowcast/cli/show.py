"""`narrowcast show`."""

from __future__ import annotations

import sys

import click
from rich.table import Table

from narrowcast.cli.completion import experiments
from narrowcast.cli.terminal import console


@click.command()
@click.argument("experiment", required=False, shell_complete=experiments)
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
def show(experiment: str | None, overrides: tuple[str, ...]) -> None:
    """List the packaged experiments and solves, or print EXPERIMENT, or a solve, with all defaults filled in.

    A benchmark is printed as its file has it.
    """
    from narrowcast.experiment import load_experiment, packaged_experiments
    from narrowcast.runs.packaged import SOLVES, names_solve, read_benchmark, summaries

    if experiment is None:
        table = Table("experiment", "description", box=None, pad_edge=False)
        for name, summary in {**packaged_experiments(), **summaries(SOLVES)}.items():
            table.add_row(name, summary)
        console().print(table)
        return
    from narrowcast.platform.config import write_yaml
    from narrowcast.solve_run import load_solve

    if (benchmark := read_benchmark(experiment, overrides)) is not None:
        write_yaml(benchmark, sys.stdout)
        return
    shown = load_solve(experiment, overrides) if names_solve(experiment) else load_experiment(experiment, overrides)
    write_yaml(shown.plain(), sys.stdout)
