"""Commands of data and keys: `data` and `keys`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.table import Table

from narrowcast.cli.shared import FOLDER, TRUST, console, experiments
from narrowcast.platform.config.trust import looking
from narrowcast.platform.errors import UserError


@click.group()
def data() -> None:
    """List, download and inspect data sets."""


@data.command("list")
def list_data() -> None:
    """List the data sets, their licences and where they were found."""
    from narrowcast.platform.data import download

    table = Table("name", "description", "licence", "found", box=None, pad_edge=False)
    for row in download.status():
        folder = row.folder or f"no: narrowcast data fetch {row.name}"
        table.add_row(row.name, row.description, row.licence, str(folder))
    console().print(table)
    click.echo("searched in " + ", then ".join(str(root) for root in download.roots()))


@data.command("fetch")
@click.argument("name")
def fetch_data(name: str) -> None:
    """Download the data set NAME, check it and unpack it."""
    from narrowcast.platform.data import download

    click.echo(f"{name} is in {download.fetch(name, progress=sys.stderr.isatty())}")


@data.command("show")
@click.argument("named", metavar="EXPERIMENT|KIND|PATH")
@click.argument("overrides", nargs=-1, metavar="[DATA.B=VALUE]...")
@click.option("--output", type=FOLDER, help="Folder of the figures and tables; ./partition-NAME by default.")
@click.option(
    "--every-partition",
    is_flag=True,
    help="Draw each partition that the data can have, and all in one figure.",
)
@TRUST
def show_data(
    named: str, overrides: tuple[str, ...], output: Path | None, *, every_partition: bool, trust: bool
) -> None:
    """Print the sizes of a data set, and draw its partition across clients: labels and sizes.

    The data set is that of an EXPERIMENT (a YAML file, or a packaged one), a KIND such as digits, or a file or folder
    at PATH: .csv, .parquet, .npz, images, or a Hugging Face data set. Values are set as for a run:
    narrowcast data show digits data.partition=dirichlet data.partition.alpha=0.1

    A class or factory that the file names runs only in folders that you trust (`narrowcast trust FOLDER`), or with
    --trust.
    """
    from narrowcast.platform.data.soundness import load_checked
    from narrowcast.platform.tracking.partition import begin_figure, write_overview, write_partition
    from narrowcast.runs.data_section import data_source, described, each_partition

    with looking(Path(named).parent, trust=trust):
        source = data_source(named, overrides)
        loaded = load_checked(source)
        table = Table(show_header=False, box=None, pad_edge=False)
        for name, value in described(loaded):
            table.add_row(name, value)
        console().print(table)
        partitions = list(each_partition(source, click.echo)) if every_partition else [("", loaded)]
    folder = output or Path(f"partition-{loaded.name}".replace("/", "-"))
    try:
        figures = [
            write_partition(partitioned, folder / kind, begin_figure(partitioned))[1]
            for kind, partitioned in partitions
        ]
        if every_partition:
            figures.append(write_overview(partitions, folder))
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}); give another folder with --output") from error
    for figure in figures:
        click.echo(f"figure  {figure}")


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
    from narrowcast.algorithms.secure.keys import make_key_files, parameters
    from narrowcast.algorithms.secure.schemes import NoProtection, library
    from narrowcast.experiment import load_experiment
    from narrowcast.platform.storage.disk import expand_home

    with looking(Path(experiment).parent, trust=trust):
        scheme = load_experiment(experiment, overrides).secure
    if isinstance(scheme, NoProtection):
        raise UserError(f"{experiment} protects nothing; add secure=ckks or secure=masked")
    for name in scheme.needs:
        library(name, f"secure.kind = {scheme.kind}")
    path = make_key_files(expand_home(folder), scheme)
    click.echo(f"keys for {parameters(scheme)} are in {path}; run with secure.keys={path.parent}")
