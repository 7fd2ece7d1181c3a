"""`narrowcast check`."""

from __future__ import annotations

from pathlib import Path

import click

from narrowcast.cli.terminal import console


@click.command()
@click.argument("spec", metavar="PACKAGE.MODULE:CLASS")
@click.argument("fields", nargs=-1, metavar="[FIELD=VALUE]...")
@click.option("--kind", metavar="REGISTRY", help="Kind of the class, if its methods fit several: algorithm, fleet, ...")
@click.option(
    "--data",
    metavar="DATA",
    help="Test a model, loss or metric on this data set: an experiment's, a kind, a file or a folder.",
)
def check(spec: str, fields: tuple[str, ...], kind: str | None, data: str | None) -> None:
    """Test a plugin class against the laws of its kind: placement, resumes, bits, budgets, pickling and YAML.

    \b
    narrowcast check my_methods:FedAvgM
    narrowcast check my_methods:FedAvgM momentum=0.5
    narrowcast check my_data:Sensors path=sensors.csv --kind data
    narrowcast check my_models:WideCNN --data mnist

    The module is searched for in the current directory and among installed packages. Built-in kinds, such as fedavg,
    can be tested too, with --kind. The exit status is 1 if a law fails.
    """  # noqa: D301 - click wants the character
    from rich.markup import escape

    from narrowcast.laws.registries import verdicts
    from narrowcast.platform.config import suggest, validate
    from narrowcast.platform.data.soundness import load_checked
    from narrowcast.platform.errors import RunFailed, UserError
    from narrowcast.platform.overrides import Defaults, apply_overrides
    from narrowcast.platform.plugins import load
    from narrowcast.registry import REGISTRIES, registry_of
    from narrowcast.runs.data_section import data_source

    if kind is not None and kind not in REGISTRIES:
        raise UserError(f"--kind {kind}: known: {', '.join(REGISTRIES)}{suggest(kind, REGISTRIES)}")
    folders = [Path.cwd()]
    if kind is None and ":" not in spec:
        raise UserError(f"{spec}: say of what kind it is with --kind, or write package.module:Class")
    registry = registry_of(load(spec, folders), spec) if kind is None else REGISTRIES[kind]
    found = registry.resolve(spec, folders)
    value = validate(found, apply_overrides({}, fields, Defaults(found, folders)), spec)
    loaded = None if data is None else load_checked(data_source(data, ()))
    reasons: list[str | None] = []
    click.echo(f"{spec}: {registry.name}")
    for verdict in verdicts(registry, value, loaded):
        says = "[green]ok[/]"
        if verdict.reason is not None:
            says = f"[red]failed[/]: {'as above' if verdict.reason in reasons else escape(verdict.reason)}"
        reasons.append(verdict.reason)
        console().print(f"  {verdict.law}: {says}", highlight=False, soft_wrap=True)
    if failed := len(reasons) - reasons.count(None):
        raise RunFailed(f"{spec}: {failed} of {len(reasons)} laws do not hold")
