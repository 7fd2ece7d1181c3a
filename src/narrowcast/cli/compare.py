"""`narrowcast compare`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from narrowcast.cli.completion import names_of_runs
from narrowcast.cli.terminal import FOLDER, console
from narrowcast.cli.uncollected import uncollected
from narrowcast.platform.errors import UserError


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=names_of_runs)
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@click.option(
    "--axis",
    "axes",
    multiple=True,
    type=click.Choice(["round", "iteration", "uplink", "total", "time"]),
    help="Horizontal axis of the plot; repeat it for several panels. All by default.",
)
@click.option("--metric", metavar="NAME", help="Metric of the plot, such as validation.accuracy.")
@click.option(
    "--columns",
    metavar="A,B,...",
    help="Columns of the results, --csv and --latex: metrics, costs such as uplink_bits, settings by dotted path.",
)
@click.option(
    "--against",
    metavar="RUN",
    help="Group of runs, or a run in it, from which the differences of the others are shown, seed by seed.",
)
@click.option("--each", is_flag=True, help="Show runs that differ only in their seeds separately.")
@click.option("--plot", type=FOLDER, help="File of the figure; compare.png in the output folder by default.")
@click.option("--csv", type=FOLDER, help="Write a row per run, with the settings that differ, to this CSV file.")
@click.option("--latex", type=FOLDER, help="Write the table of results to this LaTeX file, for the package booktabs.")
def compare(
    runs: tuple[str, ...],
    output: Path,
    axes: tuple[str, ...],
    metric: str | None,
    columns: str | None,
    against: str | None,
    each: bool,
    plot: Path | None,
    csv: Path | None,
    latex: Path | None,
) -> None:
    """Compare finished runs by accuracy, bits and time: the settings that differ, tables, and a plot.

    RUN is the name of a run in the output folder, a pattern of names, the path of a run's folder, or that of a folder
    of runs, such as a benchmark's. Runs that differ only in their seeds are one row, mean ± standard deviation, and one
    line with a band in the plot. Solves are compared with solves, by the metrics of their answers, iterations and the
    time of the solver.

    \b
    narrowcast compare 'fedavg-*' 'scolr-*' --against 'fedavg-*'       paired differences by seed
    narrowcast compare a b --columns test.accuracy,uplink_bits,training.learning_rate
    narrowcast compare a b --axis uplink --plot figure.pdf --latex table.tex     for a paper
    """  # noqa: D301 - click wants the character
    names = None if columns is None else [each.strip() for each in columns.split(",") if each.strip()]
    with uncollected():
        from narrowcast.api.functions import compare as compare_runs
        from narrowcast.runs.comparison import Comparison

        comparison = compare_runs(runs, output=output, by_seed=not each, against=against, columns=names)
    path = plot or output / "compare.png"
    written = [_write(path, "plot", lambda: comparison.plot(path, axes=axes or None, metric=metric))]
    if isinstance(comparison, Comparison) and any(run.evaluates_clients for run in comparison.runs):
        clients = path.with_name(f"{path.stem}-clients{path.suffix}")
        written.append(_write(clients, "plot", lambda: comparison.clients_figure(clients)))
    if csv is not None:
        written.append(_write(csv, "csv", lambda: comparison.chosen_table.to_csv(csv, index_label="run")))
        if against is not None:
            paired = csv.with_name(f"{csv.stem}-differences{csv.suffix}")
            written.append(_write(paired, "csv", lambda: comparison.paired_differences().to_csv(paired, index=False)))
    if latex is not None:
        written.append(_write(latex, "latex", lambda: latex.write_text(comparison.latex(), encoding="utf-8")))
    comparison.print(console())
    for line in written:
        click.echo(line)


def _write(path: Path, option: str, write: Callable[[], object]) -> str:
    """Write a file, and return the line that says where it is."""
    try:
        write()
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); give another file with --{option}") from error
    return f"{'table' if option == 'csv' else option:<7} {path}"
