"""`narrowcast ui`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from narrowcast.cli.shared import FOLDER
from narrowcast.platform.config.plugins import check_installed
from narrowcast.platform.errors import RunFailed, UserError

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
    from narrowcast.platform.tracking.store import pages_of_runs
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
        pages, server = pages_of_runs(store), Path(private, "mlflow")
        with guarded(listening, server) as token:
            start = f"http://127.0.0.1:{port}/?token={token}"
            for name, place in pages.items():  # MLflow's first page is for something else
                click.echo(f"runs of {name}: {start}{place}")
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
