"""A run leaves the environment variables and the log levels of the user's process as they were."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from narrowcast.platform.config.trust import ScopedSettings

RUN = """
import json, logging, os, sys
def now():
    levels = {name: logging.getLogger(name).level for name in ("", "mlflow", "alembic", "urllib3", "ray")}
    levels["urllib3.connectionpool"] = logging.getLogger("urllib3.connectionpool").level
    return [dict(os.environ), levels]
import mlflow, torch
before = now()
import narrowcast as nc
settings = {"rounds": 1, "data.clients": 20}
nc.run("fedavg-digits", settings, backend=sys.argv[2], output=sys.argv[1], progress=False)
print(json.dumps([before, now()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow, pytest.mark.thorough])]
)
def test_a_run_leaves_the_process_as_it_was(tmp_path: Path, backend: str) -> None:
    words = [sys.executable, "-c", RUN, str(tmp_path), backend]
    names = ("MLFLOW_", "RAY_AUTH_MODE", "RAY_USAGE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    said = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    (variables, levels), (variables_after, levels_after) = json.loads(said.stdout.splitlines()[-1])
    of_libraries = ("KMP_DUPLICATE_LIB_OK", "RAY_CLIENT_MODE", "PYTHONBREAKPOINT")  # which torch and Ray set themselves
    for name in of_libraries:
        variables.pop(name, None)
        variables_after.pop(name, None)
    if backend == "ray":
        levels_after["ray"] = levels["ray"]
    assert variables_after == variables
    assert levels_after == levels


def test_settings_of_threads_that_overlap_are_undone_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NC_FIRST", raising=False)
    monkeypatch.setenv("NC_SECOND", "the user's")
    settings = ScopedSettings({"NC_FIRST": "1", "NC_SECOND": "2"})
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with settings.in_force():
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=other)
    with settings.in_force():
        thread.start()
        entered.wait(60)
    assert (os.environ["NC_FIRST"], os.environ["NC_SECOND"]) == ("1", "the user's")
    left.set()
    thread.join()
    assert "NC_FIRST" not in os.environ
    assert os.environ["NC_SECOND"] == "the user's"
