"""Commands whose output nobody reads to its end, as with `| head -1`: they do their work and exit with 0, silently."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from command_line import narrowcast
from papers import PAPERS
from sampling import sampled

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # MLflow's SQL store
COMMANDS = [
    ["--help"],
    ["run", "--help"],
    ["--version"],
    ["list", "codec"],
    ["show"],
    ["show", "fedavg-digits"],
    ["schema"],
    ["schema", "study"],
    ["data", "list"],
    ["data", "show", "digits", "--output", "partition"],
    ["reproduce", "--list", "--papers", str(PAPERS)],
    ["manifest", "dockerfile"],
    ["tune"],
    ["list", "study"],
    ["compare", "one", "--csv", "table.csv", "--plot", "figure.png"],
    ["report", "one", "--file", "report.html"],
    ["verify", "one", "--rounds", "0"],
    ["export", "one", "--runs", "runs", "--output", "model.safetensors"],
    ["sync", "one"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("closed")
    words = ("name=one", "rounds=2", "tracking.system_metrics=false", "--output", folder / "runs")
    assert narrowcast("run", "fedavg-digits", "--backend", "local", *words).status == 0
    return folder


@contextmanager
def closed_pipe() -> Iterator[io.TextIOWrapper]:
    """Yield a stream whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        yield stream


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_whose_output_is_not_read_ends_well(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with closed_pipe() as stream:
        said = narrowcast(*words, printed_to=stream)
    assert (said.status, said.err) == (0, "")
    for name in words:
        if Path(name).suffix in (".csv", ".png", ".html", ".safetensors"):
            assert Path(name).stat().st_size > 100, "the work is done all the same"


@pytest.mark.slow
@pytest.mark.parametrize("closed", sampled([">&-", "2>&-", ">&- 2>&-", "> /dev/full"], {"> /dev/full"}))
def test_a_run_without_a_place_for_its_output_is_done_all_the_same(closed: str, tmp_path: Path) -> None:
    words = ("run", "fedavg-digits", "rounds=1", "data.clients=20", "name=quiet", "--backend", "local")
    command = shlex.join([sys.executable, "-m", "narrowcast", *words, "--output", str(tmp_path)])
    ended = subprocess.run(["/bin/sh", "-c", f"{command} {closed}"], stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "quiet" / "result.json").is_file()
    lost = "WARNING: the output is lost from here on (No space left on device)\n"
    assert ended.stderr == (lost if closed == "> /dev/full" else "")
