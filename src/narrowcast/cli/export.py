"""`narrowcast export`."""

from __future__ import annotations

from pathlib import Path

import click

from narrowcast.cli.completion import names_of_runs
from narrowcast.cli.terminal import FOLDER
from narrowcast.platform.errors import UserError

_SUFFIXES = {"safetensors": "safetensors", "torch": "pt"}


@click.command()
@click.argument("names", metavar="RUN...", nargs=-1, required=True, shell_complete=names_of_runs)
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
def export(names: tuple[str, ...], model_format: str, output: Path | None, runs: Path) -> None:
    """Write the trained global model of RUN, a finished run, or the answer of a solve, to a file.

    RUN is a run's name, a pattern of names such as 'fedavg-*', or the path of a run's folder. The inputs that the model
    was trained on, with their range, are printed, and are metadata of a safetensors file.

    Neither format executes code when it is loaded: safetensors.torch.load_file(FILE), or
    torch.load(FILE, weights_only=True) for the state_dict of the torch module.
    """
    from narrowcast.runs.any_result import load_any
    from narrowcast.runs.result import Result
    from narrowcast.runs.run_folder import find_runs

    folders = find_runs(names, runs)
    if output is not None and len(folders) > 1:
        raise UserError(f"--output names one file, and {len(folders)} runs are exported; leave it out")
    for folder in folders:
        result = load_any(folder)
        path = output or Path(f"{folder.name}.{_SUFFIXES[model_format]}")
        click.echo(f"model   {result.export(path, 'torch' if model_format == 'torch' else 'safetensors')}")
        for name, text in (result.inputs if isinstance(result, Result) else {}).items():
            click.echo(f"inputs  {name}: {text}")
