"""`narrowcast export`."""

from __future__ import annotations

from pathlib import Path

import click

from narrowcast.cli.completion import names_of_runs
from narrowcast.cli.terminal import FOLDER

_SUFFIXES = {"safetensors": "safetensors", "torch": "pt"}


@click.command()
@click.argument("run", metavar="RUN", shell_complete=names_of_runs)
@click.option(
    "--format",
    "model_format",
    type=click.Choice(list(_SUFFIXES)),
    default="safetensors",
    show_default=True,
    help="Arrays by name, or a torch state_dict.",
)
@click.option("--output", type=FOLDER, help="The file to write; RUN.safetensors or RUN.pt by default.")
@click.option("--runs", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
def export(run: str, model_format: str, output: Path | None, runs: Path) -> None:
    """Write the trained global model of RUN, a finished run, or the answer of a solve, to a file.

    Neither format executes code when it is loaded: safetensors.torch.load_file(FILE), or
    torch.load(FILE, weights_only=True) for the state_dict of the torch module.
    """
    from narrowcast.api.functions import load_run

    result = load_run(run, output=runs)
    path = output or Path(f"{result.folder.name}.{_SUFFIXES[model_format]}")
    click.echo(f"model   {result.export(path, 'torch' if model_format == 'torch' else 'safetensors')}")
