"""`narrowcast keys`."""

from __future__ import annotations

from pathlib import Path

import click

from narrowcast.cli.completion import experiments
from narrowcast.cli.terminal import TRUST
from narrowcast.platform.errors import UserError
from narrowcast.platform.trust import looking


@click.group()
def keys() -> None:
    """Generate the clients' keys for secure aggregation before a run."""


@keys.command("make")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("experiment", shell_complete=experiments)
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@TRUST
def make(folder: Path, experiment: str, overrides: tuple[str, ...], *, trust: bool) -> None:
    """Generate keys in FOLDER for the scheme of EXPERIMENT's `secure` section.

    They are written to one file, clients.key, that only you can read. Runs with secure.keys=FOLDER use them, also after
    a resume. Only the key holder's process reads the file; the server's process never does.

    \b
    narrowcast keys make ~/keys colr-ckks-ml1m
    narrowcast run colr-ckks-ml1m secure.keys=~/keys
    """  # noqa: D301 - click wants the character
    from narrowcast.algorithms.secure.key_files import make_key_files, parameters
    from narrowcast.algorithms.secure.optional_imports import library
    from narrowcast.algorithms.secure.protection import NoProtection
    from narrowcast.experiment import load_experiment
    from narrowcast.platform.disk import expand_home

    with looking(Path(experiment).parent, trust=trust):
        scheme = load_experiment(experiment, overrides).secure
    if isinstance(scheme, NoProtection):
        raise UserError(f"{experiment} protects nothing; add secure=ckks or secure=masked")
    for name in scheme.needs:
        library(name, f"secure.kind = {scheme.kind}")
    path = make_key_files(expand_home(folder), scheme)
    click.echo(f"keys for {parameters(scheme)} are in {path}; run with secure.keys={path.parent}")
