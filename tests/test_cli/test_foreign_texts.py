"""Texts in the files of somebody else are shown as they are: no escape reaches a terminal, no markup ends a command."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.table import Table

import narrowcast as nc
from command_line import Said, narrowcast
from narrowcast.cli.main import Text
from narrowcast.platform.errors import printable
from narrowcast.platform.tracking.figures import as_png, log_axis, new_figure
from narrowcast.runs.html_report import html_page
from narrowcast.runs.terminal_output import OutputUntilClosed, PlainConsole

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
TEXTS = {
    "window title": "a\x1b]0;owned\x07b",
    "clear screen": "a\x1b[2J\x1b[Hb",
    "one byte": "a\x9b2Jb",
    "bell and backspace": "a\a\b\b\bb",
    "carriage return": "a\rb",
    "bidi": "a\u202egpj.b\u2066",
    "markup": "a[/]b",
    "open markup": "[red]a[link=http://x]b",
    "formula": "a$\\frac{1$b",
    "emoji": ":smile: a",
    "html": "<b>a</b>&<script>",
    "latex": "a_{b}%&\\input",
    "table": "a|b`c",
}
QUICK = ("window title", "bidi", "markup", "formula")
"""One of each layer that would obey; the others are for `make thorough`."""
OBEYED = ("\x1b", "\x9b", "\a", "\b", "\r", "\u202e", "\u2066")


@pytest.fixture(
    params=[
        pytest.param(text, id=name, marks=[] if name in QUICK else [pytest.mark.slow, pytest.mark.thorough])
        for name, text in TEXTS.items()
    ]
)
def theirs(
    request: pytest.FixtureRequest, run_and_solve: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Return a folder with a run and a solve, of which every name, label, setting and metric has a hostile text."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run_and_solve, tmp_path / "theirs")
    metric = "test.error" + str(request.param)
    for name, table in (("digits", "rounds.parquet"), ("asd", "iterations.parquet")):
        folder = tmp_path / "theirs" / name
        result = json.loads((folder / "result.json").read_text())
        for key in ("name", "algorithm", "data", "solver", "problem", "git_commit", "backend", "stopped_by"):
            if key in result:
                result[key] = f"{result[key]} {request.param}"
        result["final"][metric] = 0.5
        result["baselines"] = {f"base {request.param}": {metric: 0.25}}
        result["targets"] = [
            {"metric": metric, "value": 0.1, **dict.fromkeys(each)}
            for each in [[key for key in (result["targets"] or [{}])[0] if key not in ("metric", "value")]]
            if each
        ]
        (folder / "result.json").write_text(json.dumps(result))
        rows = pq.read_table(folder / table)
        pq.write_table(rows.append_column(metric, [[0.5] * rows.num_rows]), folder / table)
        config = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(f"{config}\nnote: {json.dumps(str(request.param))}\n")
    return tmp_path / "theirs"


def assert_plain(said: Said, *phrases: str) -> None:
    """It ended well, and no output would be obeyed by a terminal."""
    assert said.status == 0, said.err
    assert "Traceback" not in said.err
    for text in (said.out, said.err):
        assert not [each for each in OBEYED if each in text]
        assert printable(text, "\n\t\xa0") == text
    for phrase in phrases:
        assert phrase in said.out.replace("\n", " ")


@pytest.mark.slow
def test_every_command_that_shows_a_folder(theirs: Path, tmp_path: Path) -> None:
    shutil.copytree(theirs / "asd", theirs / "second")
    assert_plain(narrowcast("compare", theirs / "digits"), "digits")
    assert_plain(
        narrowcast("compare", theirs / "asd", theirs / "second", "--each", "--latex", "x.tex", "--csv", "x.csv")
    )
    for name in ("digits", "asd"):
        assert_plain(narrowcast("report", theirs / name))
    assert_plain(narrowcast("report", theirs / "asd", theirs / "second", "--file", "both.html"))
    assert_plain(narrowcast("export", theirs / "digits", theirs / "asd"))
    shutil.rmtree(theirs / "second")
    assert_plain(narrowcast("site", theirs / "asd"))
    pages = [*theirs.rglob("*.html"), *(tmp_path / "site").rglob("*.html"), tmp_path / "both.html"]
    assert len(pages) >= 6
    for page in pages:
        text = page.read_text()
        assert not [each for each in OBEYED if each in text], page
        assert "<b>a</b>" not in text
    for run in (nc.load_run(theirs / "digits"), nc.load_run(theirs / "asd")):
        assert printable(repr(run), "\n") == repr(run)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_errors_show_them_too(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(json.dumps({"data": text, text: 1, "name": text}))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text(json.dumps({"name": text, text: text}))
    (tmp_path / "run" / "rounds.parquet").write_text(text)
    (tmp_path / "run" / "tracking.json").write_text(json.dumps({"uri": f"x://{text}", "run_id": text}))
    for words in (
        *(("run", "mine.yaml"), ("show", "mine.yaml"), ("report", "run"), ("compare", "run"), ("sync", "run")),
        *(("compare", text), ("tune", text), ("jobs", "logs", text, "--address", text), ("--log-format", text, "list")),
    ):
        said = narrowcast(*words)
        assert said.status in (1, 2)
        assert "Traceback" not in said.err
        assert printable(said.out + said.err, "\n") == said.out + said.err, words


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_output_of_every_layer(text: str, tmp_path: Path) -> None:
    shown = printable(text)
    assert not [each for each in OBEYED if each in shown]
    table = Table(title=text, caption=text)
    table.add_column(text)
    table.add_row(text)
    console = PlainConsole(file=io.StringIO(), width=200, force_terminal=True, highlight=False)
    console.print(table, text)
    content = console.file.getvalue()  # type: ignore[attr-defined]
    for each in OBEYED[1:]:
        assert each not in content
    assert all(
        part.startswith("[") and part.partition("m")[0][1:].replace(";", "").isdigit()
        for part in content.split("\x1b")[1:]
    ), "the console's own styles alone"
    seen = "".join(filter(str.isprintable, text))
    assert content.count(seen) == 5, "title, head, cell, caption and line"
    stream = io.StringIO()
    OutputUntilClosed(stream).write(f"{text}\n\tx")
    assert stream.getvalue() == f"{shown}\n\tx"
    record = logging.LogRecord("narrowcast", logging.WARNING, "", 0, "%s", (text,), None)
    assert Text("%(message)s").format(record) == shown
    assert shown in html_page("a page", [text])
    figure, (panel, _) = new_figure(text, panels=2)
    panel.plot([1, 10, 100], [1, 2, 3], label=text)
    panel.set(xlabel=text, ylabel=text, title=text)
    panel.set_yticks([1, 2], labels=[shown, shown])
    log_axis(panel, panel.lines[0].get_xdata())  # type: ignore[arg-type]
    panel.text(1, 1, text)
    panel.legend()
    figure.legend()
    assert len(as_png(figure)) > 1000
    figure.savefig(tmp_path / "figure.pdf")


def test_formulas_of_ticks_stay_and_those_of_names_do_not() -> None:
    figure, (panel,) = new_figure("$x$", panels=1)
    panel.plot([1, 1e6], [1, 2], label="$y$")
    panel.set_xscale("log")
    panel.legend()
    as_png(figure)
    ticks = [each for each in panel.get_xticklabels() if "10^" in each.get_text()]
    assert ticks
    assert all(each.get_parse_math() for each in ticks)
    (label,) = panel.get_legend().get_texts()
    assert not label.get_parse_math()


@pytest.mark.slow
def test_colours_of_the_consoles_own_reach_a_terminal(tmp_path: Path) -> None:
    """A real terminal gets the styles of tables, and no escape of a name."""
    (tmp_path / "mine.yaml").write_text(json.dumps({"name": "a\x1b]0;owned\x07", "data": "digits"}))
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    done = subprocess.Popen(
        [sys.executable, "-m", "narrowcast", "list"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
        cwd=tmp_path,
    )  # fmt: skip
    os.close(theirs)
    content = b"".join(iter(lambda: _read(ours), b""))
    assert done.wait(60) == 0
    os.close(ours)
    assert b"\x1b[1m" in content, "the heads of a table are bold"


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 10_000)
    except OSError:  # the other end was closed
        return b""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ± ≥ Größe \U0001f600", "plain ± ≥ Größe \U0001f600"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\x1b[2Jb", "a?[2Jb"),
        ("a\tb\nc", "a b c"),
        ("a\udc80b", "a?b"),
        ("", ""),
    ],
)
def test_what_is_printable_stays(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(text, "\n\t").replace("\t", " ").replace("\n", " ") == shown
