"""Parts of several commands: options, output, completion of names in the shell, imports without garbage collection."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import click
from click.shell_completion import CompletionItem
from rich.table import Table

from narrowcast.platform.config.redaction import redact
from narrowcast.runs.terminal_output import PlainConsole, plain

FOLDER = click.Path(file_okay=True, path_type=Path)
TRUST = click.option("--trust", is_flag=True, help="Let code run that a file names, though it is only looked at.")
"""Of commands that only look at a file or a run."""
_PLAIN_WIDTH = 120  # columns of a table that does not go to a terminal


def console() -> PlainConsole:
    """Return the terminal, or a page of fixed width if the output goes elsewhere."""
    return PlainConsole(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def print_summaries(what: str, summaries: Mapping[str, str]) -> None:
    """Print a table of names, such as those of packaged experiments, with a line on each."""
    table = Table(what, "description", box=None, pad_edge=False)
    for name, summary in summaries.items():
        table.add_row(name, summary)
    console().print(table)


def pairs_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return labels and values as a table of two columns, such as the summary of a run."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, value)
    return table


def complain(text: str) -> None:
    """Print a line to stderr, without secrets and commands to the terminal."""
    click.echo(f"narrowcast: {plain(redact(text))}", err=True)


def experiments(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the packaged experiments and solves, or let the shell complete the path of a file."""
    del context, parameter
    from narrowcast.packaged import EXPERIMENTS, SOLVES, summaries

    return _matching({**summaries(EXPERIMENTS), **summaries(SOLVES)}.items(), incomplete)


def studies(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the packaged studies, or let the shell complete the path of a file."""
    del context, parameter
    from narrowcast.packaged import STUDIES, summaries

    return _matching(summaries(STUDIES).items(), incomplete)


def benchmarks(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the packaged benchmarks, or let the shell complete the path of a file."""
    del context, parameter
    from narrowcast.packaged import BENCHMARKS, summaries

    return _matching(summaries(BENCHMARKS).items(), incomplete)


def names_of_runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the runs of the output folder that the command names, or let the shell complete a path."""
    del parameter
    from narrowcast.runs.folder import CONFIG

    output = context.params.get("runs" if context.command.name == "export" else "output") or Path("runs")
    folders = sorted(file.parent.name for file in output.glob(f"*/{CONFIG}"))
    return _matching(((name, None) for name in folders), incomplete)


def _matching(names: Iterable[tuple[str, str | None]], incomplete: str) -> list[CompletionItem]:
    completions = [CompletionItem(name, help=text) for name, text in names if name.startswith(incomplete)]
    return completions or [CompletionItem(incomplete, type="file")]


_COMMANDS = count()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection during the imports of a process's first command, then freeze what they allocated.

    Torch and MLflow make half a million objects that stay as long as the process. A second
    command of the process has imported them already, and would only keep the garbage of the first one for ever.
    """
    if next(_COMMANDS):  # gc.get_freeze_count() counts the frozen objects one by one
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
