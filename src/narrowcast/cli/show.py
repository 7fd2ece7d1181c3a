"""`narrowcast show`."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from pathlib import Path

import click

from narrowcast.cli.completion import experiments
from narrowcast.cli.terminal import TRUST, print_summaries
from narrowcast.platform.errors import UserError
from narrowcast.platform.trust import looking


@click.command()
@click.argument("experiment", required=False, shell_complete=experiments)
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@TRUST
def show(experiment: str | None, overrides: tuple[str, ...], *, trust: bool) -> None:
    """List the packaged experiments and solves, or print EXPERIMENT, or a solve, with all defaults filled in.

    A pattern such as 'fedavg-*' lists those whose names match.

    A benchmark is printed as its file has it. Classes of the file's own are imported only in folders that you trust
    (`narrowcast trust FOLDER`), or with --trust.
    """
    from narrowcast.experiment import load_experiment, packaged_experiments
    from narrowcast.packaged import SOLVES, names_solve, read_benchmark, summaries

    pattern = experiment or "*"
    if "*" in pattern:
        known = {**packaged_experiments(), **summaries(SOLVES)}
        if not (matching := [name for name in known if fnmatchcase(name, pattern)]):
            raise UserError(f"no packaged experiment matches {pattern}; packaged: {', '.join(known)}")
        print_summaries("experiment", {name: known[name] for name in matching})
        return
    assert experiment is not None
    from narrowcast.platform.config import write_yaml
    from narrowcast.solve_run import load_solve

    if (benchmark := read_benchmark(experiment, overrides)) is not None:
        write_yaml(benchmark, sys.stdout)
        return
    load = load_solve if names_solve(experiment) else load_experiment
    with looking(Path(experiment).parent, trust=trust):
        values = load(experiment, overrides).plain()
    write_yaml(values, sys.stdout)
