"""Tutorials are notebooks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import narrowcast as nc
from notebooks import notebook
from pages import DOCS, tutorials

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
AS_NOTEBOOK = "tutorials/tune-and-submit"


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
