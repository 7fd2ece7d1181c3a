"""Completion in the shell of the names of packaged experiments and studies, and of runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem


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
    from narrowcast.runs.run_folder import CONFIG

    output = context.params.get("runs" if context.command.name == "export" else "output") or Path("runs")
    folders = sorted(each.parent.name for each in output.glob(f"*/{CONFIG}"))
    return _matching(((name, None) for name in folders), incomplete)


def _matching(names: Iterable[tuple[str, str | None]], incomplete: str) -> list[CompletionItem]:
    found = [CompletionItem(name, help=text) for name, text in names if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]
