"""Tutorials and a whole study run, as scripts and as a notebook, and show what their text says."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import narrowcast as nc
from command_line import narrowcast
from notebooks import DOCS, blocks, notebook, tutorials

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
Names = dict[str, Any]


def first_experiment(names: Names) -> None:
    dense, coded = names["dense"], names["coded"]
    assert coded.uplink_bits * 20 < dense.uplink_bits
    assert coded.simulated_seconds * 5 < dense.simulated_seconds
    assert min(names["accuracies"]) > 80
    assert Path("digits.png").stat().st_size > 10_000


def own_model_and_data(names: Names) -> None:
    assert 0.8 < names["result"].final["test.coverage"] < 1
    assert names["result"].best["test.loss"].value == names["result"].rounds["test.loss"].min()
    assert names["path"].stat().st_size > 0


def own_algorithm_and_codec(names: Names) -> None:
    fedavg, momentum, signs = names["results"]
    assert momentum.final["test.accuracy"] > fedavg.final["test.accuracy"]
    assert 25 < fedavg.uplink_bits / signs.uplink_bits < 33


def channel_and_budgets(names: Names) -> None:
    assert names["ranks"].simulated_seconds * 5 < names["same_for_all"].simulated_seconds
    assert set(names["ranks"].clients["rank"]) >= {0, 1, 16}
    fair, equal = (each.clients[each.clients.delivered].uplink_bits for each in names["results"])
    assert fair.quantile(0.1) > equal.quantile(0.1)


def study_for_a_paper(names: Names) -> None:
    runs = {each.name: each for each in names["results"]}
    assert len(runs) == 12
    assert all(each.final["test.rmse"] < 1.5 for each in runs.values())  # it starts at 3
    assert all(
        runs[f"{name}-shared-seed-{seed}"].uplink_bits < runs[f"{name}-orthogonal-seed-{seed}"].uplink_bits
        for name in names["methods"]
        for seed in range(3)
    )
    assert len({each.model_sha256 for each in runs.values()}) == 12
    assert all(Path(file).stat().st_size > 0 for file in ("figure.pdf", "table.tex", "runs.csv"))


SHOWN: dict[str, Callable[[Names], None]] = {
    "tutorials/first-experiment": first_experiment,
    "tutorials/own-model-and-data": own_model_and_data,
    "tutorials/own-algorithm-and-codec": own_algorithm_and_codec,
    "tutorials/channel-and-budgets": channel_and_budgets,
    "howto/study-for-a-paper": study_for_a_paper,
}
AS_NOTEBOOK = "tutorials/tune-and-submit"
# A minute of laws; tests/test_cli/test_check.py tries them on the same method, docs/examples/fedavgm.py.
CHECKED_ELSEWHERE = "narrowcast check server_momentum:ServerMomentum"


def test_every_tutorial_is_run_below() -> None:
    assert {f"tutorials/{page.stem}" for page in tutorials()} <= {*SHOWN, AS_NOTEBOOK}


@pytest.mark.parametrize("page", tutorials(), ids=lambda page: page.stem)
def test_every_tutorial_is_a_valid_notebook_without_outputs(page: Path) -> None:
    made = notebook(page)
    nbformat.validate(made)
    code = [cell for cell in made.cells if cell.cell_type == "code"]
    assert len(code) > 3
    assert not any(cell.outputs for cell in code)
    assert nbformat.writes(made) == nbformat.writes(notebook(page))
    for cell in code:
        if not cell.source.startswith(("%%writefile", "!")):
            compile(cell.source, page.name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_a_tutorial_is_a_script(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # as a script and a notebook have it
    names: Names = {}
    for block in blocks(DOCS / f"{name}.md"):
        match block.kind:
            case "file":
                Path(block.name).write_text(block.content)
            case "python":
                exec(compile(block.content, name, "exec"), names)
            case "console":
                for line in block.content.splitlines():
                    if line == CHECKED_ELSEWHERE:
                        continue
                    said = narrowcast(*shlex.split(line, comments=True)[1:])
                    assert said.status == 0, (line, said.out, said.err)
    SHOWN[name](names)


@pytest.mark.slow
def test_a_tutorial_is_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    made = notebook(DOCS / f"{AS_NOTEBOOK}.md")
    cells = []
    for cell in made.cells:
        cells.append(cell)
        if cell.source.startswith("!"):  # Jupyter goes on after a command that failed
            cells.append(nbformat.v4.new_code_cell("assert _exit_code == 0"))
    made.cells = cells
    NotebookClient(made, timeout=250, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in made.cells for output in cell.get("outputs", ()) if output.output_type != "stream"]
    assert sum("<table" in output.data.get("text/html", "") for output in shown) == 2
    assert nc.load_run("chosen", output=tmp_path / "runs").final["test.accuracy"] > 0.8
