"""What all tests share: where data is found, a home of their own, and no process left behind."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shared_ray import ray_cluster

pytest_plugins = ["left_out", "page_summary", "worker_memory"]

# Read when Ray and narrowcast are imported, so set before any test module is.
_BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"
if _BESIDE.is_dir():
    os.environ.setdefault("NARROWCAST_DATA", str(_BESIDE))
if "PYTEST_XDIST_WORKER" in os.environ:  # threads of several workers that wait for each other take twice the time
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell's background job, or nohup, ignores signals, and what tests start would inherit that.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)
os.environ.setdefault("RAY_AUTH_MODE", "token")  # a test may import Ray before narrowcast, which sets it
os.environ.pop("RAY_ADDRESS", None)
# A token of their own, whatever the home folder has.
_TOKEN = Path(tempfile.mkdtemp(prefix="nc-token-")) / "auth_token"
_TOKEN.touch(mode=0o600)
_TOKEN.write_text(secrets.token_hex(32))
atexit.register(shutil.rmtree, _TOKEN.parent, ignore_errors=True)
os.environ["RAY_AUTH_TOKEN_PATH"] = str(_TOKEN)
os.environ.pop("RAY_AUTH_TOKEN", None)
os.environ["XDG_CONFIG_HOME"] = str(_TOKEN.parent)  # settings of their own: no folder is trusted
os.environ.pop("MLFLOW_TRACKING_URI", None)
os.environ["MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"] = "1"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - at 15, Ray's own, actors starve beside other tests
os.environ["NARROWCAST_FIGURES"] = "never"  # most of the time of a short run; tests that look at them draw them


@pytest.fixture(autouse=True, scope="session")
def _no_process_left() -> Iterator[None]:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not alive, f"processes left behind: {alive}"


@pytest.fixture(scope="module")
def drawn() -> Iterator[None]:
    """Draw the figures of runs and solves, from the first test of a module that asks for them on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NARROWCAST_FIGURES")
        yield


@pytest.fixture(scope="module")
def shared_ray() -> Iterator[None]:
    """Make all runs of a module that are to start a cluster join the same one."""
    with ray_cluster() as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", address)
        yield


@pytest.fixture(scope="module")
def run_and_solve(tmp_path_factory: pytest.TempPathFactory, drawn: None) -> Path:
    """Return an output folder with a finished run, `digits`, and a finished solve, `asd`."""
    import narrowcast as nc  # after the environment is set

    output = tmp_path_factory.mktemp("finished")
    settings = {"rounds": 2, "data.clients": 20, "tracking.system_metrics": False, "name": "digits"}
    nc.run("fedavg-digits", settings, output=output, backend="local", progress=False)
    solve = {"problem": {"kind": "synthetic_completion", "rows": 20, "columns": 20, "rank": 1}, "solver": "asd"}
    tracking = {"system_metrics": False}
    nc.run({**solve, "name": "asd", "iterations": 5, "tracking": tracking}, output=output, progress=False)
    return output
