"""The commands and the experiment files that the pages show are accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from ruamel.yaml import YAML

from command_line import narrowcast
from narrowcast.cli.main import cli
from pages import DOCS, blocks, pages

_OWN = re.compile(r"\w:[A-Z]")
_PACKAGED = {path.stem for path in (DOCS.parent / "src/narrowcast/experiments").glob("*.yaml")}


def commands(run_by_all: bool = True) -> list[str]:
    """The command lines of all pages, each once, without what a shell does with them."""
    consoles = [block for page in pages() for block in blocks(page) if block.kind == "console"]
    lines = {line for each in consoles if run_by_all or each.not_run or each.data for line in each.commands}
    return sorted({re.split(r" (\||>|&&)", line)[0] for line in lines if line.startswith("narrowcast ")})


def packaged_runs() -> list[list[str]]:
    """Packaged experiments with their overrides, in commands that no test or not every test runs."""
    found = []
    for line in commands(run_by_all=False):
        context = click.Context(cli, resilient_parsing=True, **cli.context_settings)
        _, name, *words = shlex.split(line)
        command = cli.get_command(context, name)
        if name not in ("run", "show", "submit") or command is None:
            continue
        given = command.make_context(name, words, parent=context, resilient_parsing=True).params
        overrides = [each for each in given["overrides"] or () if not each.startswith("replicas.")]
        experiment = given["source" if name == "submit" else "experiment"]
        if experiment in _PACKAGED and not any(_OWN.search(each) for each in overrides):
            found.append([experiment, *overrides])
    return found


def experiments() -> list[str]:
    """The blocks that are whole experiments, of classes of the catalog."""
    found = []
    for block in (block for page in pages() for block in blocks(page) if block.kind in ("yaml", "file")):
        values = YAML(typ="safe").load(block.content) if not block.name.endswith(".py") else None
        if isinstance(values, dict) and {"data", "algorithm"} <= {*values} and not _OWN.search(block.content):
            found.append(block.content)
    return found


@pytest.mark.parametrize("line", commands())
def test_a_command_and_its_options_exist(line: str) -> None:
    context, command, words = click.Context(cli, **cli.context_settings), cli, shlex.split(line)[1:]
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, f"there is no command {name}"
        context, command = click.Context(found, parent=context, resilient_parsing=True), found
    command.parse_args(context, words)  # raises for an option that there is not


@pytest.mark.parametrize("words", packaged_runs(), ids=" ".join)
def test_the_overrides_of_a_packaged_experiment_are_accepted(words: list[str]) -> None:
    said = narrowcast("show", *words)
    assert said.status == 0, said.err


@pytest.mark.parametrize("block", experiments())
def test_an_experiment_of_a_page_is_accepted(block: str, tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(block)
    said = narrowcast("show", file)
    assert said.status == 0, said.err
