"""The session of docs/python-api.md in a notebook, with its running event loop and its Ctrl-C."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from pages import DOCS, blocks

EXAMPLES = [block.content for block in blocks(DOCS / "python-api.md") if block.kind == "python" and not block.not_run]

STRAIGHT = """
import asyncio, os, signal, threading, time
from pathlib import Path
settings = {"rounds": 60, "evaluate_every": 30, "checkpoint_seconds": 1000}
other = {**settings, "name": "straight"}
straight = await asyncio.to_thread(nc.run, "fedavg-digits", other, backend="local", progress=False)
"""
INTERRUPTED = """
def interrupt_after(rounds, journal=Path("runs/cut/journal.jsonl")):
    while not journal.exists() or journal.read_bytes().count(b"\\n") < rounds:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGINT)  # as the notebook's server does

threading.Thread(target=interrupt_after, args=(5,)).start()
try:
    nc.run("fedavg-digits", {**settings, "name": "cut"}, backend="local", progress=False)
except KeyboardInterrupt as stop:
    print(*stop.__notes__)
"""
RESUMED = """
assert not Path("runs/cut/result.json").exists()
from narrowcast.platform.storage.checkpoint import load_checkpoint
from narrowcast.platform.rounds.state import RunState
assert load_checkpoint("runs/cut/checkpoint", RunState)[0].round_index >= 4  # the interruption's
cut = nc.run(resume="cut", progress=False)
assert cut.model_sha256 == straight.model_sha256
cut
"""


@pytest.mark.slow
def test_the_page_is_a_notebook_that_can_be_interrupted(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(each) for each in (*EXAMPLES, STRAIGHT, INTERRUPTED, RESUMED)]
    client = NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises what a cell raises
    assert "resume with nc.run(resume='cut', output='runs')" in str(notebook.cells[-2].outputs)
    shown = [output for cell in notebook.cells for output in cell.outputs if output.output_type == "execute_result"]
    assert "<table>" in shown[-1].data["text/html"]
    assert any("image/png" in output.data for output in shown)
