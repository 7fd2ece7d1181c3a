"""Commands that look at several runs: `compare`, `report`, `site` and `ui`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from narrowcast.cli.shared import FOLDER, console, gc_paused, names_of_runs
from narrowcast.platform.config.plugins import check_installed
from narrowcast.platform.errors import RunFailed, UserError

if TYPE_CHECKING:
    from narrowcast.runs.result import Result, SolveResult


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=names_of_runs)
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@click.option("--folder", type=FOLDER, default=Path("site"), show_default=True, help="Folder of the site's pages.")
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="Error to go by, such as test.unseen_error; repeat it for problems that measure others. The first error on "
    "test data by default.",
)
@click.option(
    "--tolerance",
    "tolerances",
    multiple=True,
    type=float,
    help="Error that is a goal; repeat it for several. 1e-4, 1e-2 and 1e-8 by default.",
)
@click.option(
    "--within",
    multiple=True,
    type=float,
    help="Goal relative to the least error of any run on a problem, such as 0.01 for 1 % above it, the default.",
)
def site(
    runs: tuple[str, ...],
    output: Path,
    folder: Path,
    metrics: tuple[str, ...],
    tolerances: tuple[float, ...],
    within: tuple[float, ...],
) -> None:
    """Write the site of a benchmark: performance profiles, curves and tables of solves, in static pages.

    RUN is the name of a solve in the output folder, or the path of its folder, or of a folder of several; all solves of
    the output folder by default. The pages need neither a server nor a network.

    \b
    narrowcast benchmark completion-65
    narrowcast site runs/completion-65 --tolerance 1e-4 --tolerance 1e-8
    """  # noqa: D301 - click wants the character
    from narrowcast.api import site as write_site

    page = write_site(
        runs or None, folder, output=output, metrics=metrics, tolerances=tolerances or None, within=within or None
    )
    click.echo(f"site    {page}")


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@click.option(
    "--file", type=FOLDER, help="File of the report; report.html in the run's folder, or in OUTPUT, by default."
)
@click.option("--each", is_flag=True, help="Show runs that differ only in their seeds separately.")
@click.option(
    "--against", metavar="RUN", help="Group of runs from which the differences of the others are shown, seed by seed."
)
def report(runs: tuple[str, ...], output: Path, file: Path | None, each: bool, against: str | None) -> None:
    """Write the report of a run, or the comparison of several, as one HTML file.

    The file includes the figures, needs no network and runs no script. A run whose clients have models of their own
    stands beside its controls. RUN is the name of a run in the output folder, a pattern of names such as 'fedavg-*',
    the path of a run's folder, or that of a folder of runs.
    """
    from narrowcast.api import compare
    from narrowcast.runs.folder import find_runs
    from narrowcast.runs.result import load_any

    folders = find_runs(runs, output)
    if len(folders) == 1:
        run = load_any(folders[0])
        path = run.report(file or folders[0] / "report.html", _controls(run))
    else:
        compared = compare(folders, output=output, by_seed=not each, against=against)
        path = compared.report(file or output / "report.html")
    click.echo(f"report  {path}")


def _controls(run: Result | SolveResult) -> list[str]:
    """Return the part of a report on a run beside its controls, as HTML; none for a run that has no controls."""
    from narrowcast.api import compare
    from narrowcast.runs.html_report import section
    from narrowcast.runs.result import Result

    comparison = compare(run) if isinstance(run, Result) and run.file.personal else None
    if comparison is None or not comparison.remarks:
        return []
    table = comparison.text_tables().get("Metrics over clients")
    rows = [table.html()] if table is not None and comparison.added else []
    return [section("Controls", "".join([*rows, *(f"<p>{escape(line)}</p>" for line in comparison.remarks)]))]


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
    names = None if columns is None else [column.strip() for column in columns.split(",") if column.strip()]
    with gc_paused():
        from narrowcast.api import compare as compare_runs
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


_SECONDS_TO_END = 10.0
_SHORT = "/tmp"


@click.command()
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs.")
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True)
def ui(output: Path, port: int) -> None:
    """Open the MLflow UI with the runs of the output folder, for this machine only (127.0.0.1).

    It opens by the addresses that are printed, which have a token: other accounts of the machine are refused.
    """
    from narrowcast.platform.config.run_fields import Tracking
    from narrowcast.platform.tracking.store import end_abandoned, pages_of_runs
    from narrowcast.platform.tracking.view import EXPERIMENTS, guarded

    check_installed("mlflow", "narrowcast ui")
    store = Tracking().resolve(output)
    uri = store.uri
    if uri.startswith(("http://", "https://")):
        raise UserError(f"the runs are tracked at {store.shown}; open that address in a browser")
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file():
        raise UserError(f"no runs in {output}; start one with narrowcast run, or give another folder with --output")
    with socket.socket() as listening, TemporaryDirectory(prefix="narrowcast-ui-", dir=_SHORT) as private:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
            listening.listen()  # at once: until then another process, of anybody, may take the port
        except OSError as error:
            raise UserError(f"port {port} is taken ({error.strerror}); give another with --port") from error
        end_abandoned(store, output)
        pages, server = pages_of_runs(store), Path(private, "mlflow")
        with guarded(listening, server) as token:
            start = f"http://127.0.0.1:{port}/?token={token}"
            for name, page in pages.items():  # MLflow's first page is for something else
                click.echo(f"runs of {name}: {start}{page}")
            click.echo(f"MLflow UI on {start}{EXPERIMENTS} (stop with Ctrl-C)")
            if (status := _serve(uri, port, server)) is not None:
                raise RunFailed(f"the MLflow UI stopped with status {status}; what it wrote above says why")


def _serve(uri: str, port: int, unix_socket: Path) -> int | None:
    """Run the server at a Unix socket and return its exit status; None if Ctrl-C, SIGTERM or a hangup ended it."""
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "mlflow", "ui", "--workers", "1"),
            *("--host", "127.0.0.1", "--port", str(port), "--uvicorn-opts", f"--uds {unix_socket}"),
        ],
        env={
            **os.environ,
            "MLFLOW_BACKEND_STORE_URI": uri,  # every account can list the arguments of a process
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        },  # else seven processes more
        start_new_session=True,  # so that the processes it starts end with it
    )
    try:
        return server.wait()
    except KeyboardInterrupt:
        click.echo()
        return None
    finally:
        _end_group(server)


def _end_group(leader: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGTERM)
    try:
        with suppress(subprocess.TimeoutExpired):
            leader.wait(_SECONDS_TO_END)
    finally:  # at once after a second Ctrl-C
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
