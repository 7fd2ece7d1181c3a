"""`narrowcast check`."""

from __future__ import annotations

from pathlib import Path

import click

from narrowcast.cli.terminal import console


@click.command()
@click.argument("spec", metavar="PACKAGE.MODULE:CLASS")
@click.argument("fields", nargs=-1, metavar="[FIELD=VALUE]...")
@click.option("--kind", metavar="REGISTRY", help="Kind of the class, if its methods fit several: algorithm, fleet, ...")
def check(spec: str, fields: tuple[str, ...], kind: str | None) -> None:
    """Test a plugin class against the laws of its kind: placement, resumes, bits, budgets, pickling and YAML.

    \b
    narrowcast check my_methods:FedAvgM
    narrowcast check my_methods:FedAvgM momentum=0.5
    narrowcast check my_data:Sensors path=sensors.csv --kind data

    The module is searched for in the current directory and among installed packages. Built-in kinds, such as fedavg,
    can be tested too, with --kind. The exit status is 1 if a law fails.
    """  # noqa: D301 - click wants the character
    from rich.markup import escape
    from rich.table import Table

    from narrowcast.laws.registries import verdicts
    from narrowcast.platform.config import suggest, validate
    from narrowcast.platform.errors import RunFailed, UserError
    from narrowcast.platform.overrides import Defaults, apply_overrides
    from narrowcast.platform.plugins import load
    from narrowcast.registry import REGISTRIES, registry_of

    if kind is not None and kind not in REGISTRIES:
        raise UserError(f"--kind {kind}: known: {', '.join(REGISTRIES)}{suggest(kind, REGISTRIES)}")
    folders = [Path.cwd()]
    if kind is None and ":" not in spec:
        raise UserError(f"{spec}: say of what kind it is with --kind, or write package.module:Class")
    registry = registry_of(load(spec, folders), spec) if kind is None else REGISTRIES[kind]
    found = registry.resolve(spec, folders)
    value = validate(found, apply_overrides({}, fields, Defaults(found, folders)), spec)
    table = Table(title=f"{spec}: {registry.name}", box=None, title_justify="left")
    table.add_column("law", no_wrap=True)
    table.add_column("", overflow="fold")
    failed = 0
    for verdict in verdicts(registry, value):
        failed += verdict.reason is not None
        table.add_row(verdict.law, "ok" if verdict.reason is None else f"[red]failed[/]: {escape(verdict.reason)}")
    console().print(table)
    if failed:
        raise RunFailed(f"{spec}: {failed} of {table.row_count} laws do not hold")
