"""`narrowcast schema`."""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("file", type=click.Choice(["experiment", "solve", "benchmark", "study"]), default="experiment")
def schema(file: str) -> None:
    """Print the JSON Schema of an experiment, solve, benchmark or study file, for editors that complete and check YAML.

    \b
    narrowcast schema > experiment.schema.json

    Then write this as the first line of an experiment file in the same folder:
    # yaml-language-server: $schema=experiment.schema.json
    """  # noqa: D301 - click wants the character
    from narrowcast.reference import file_schemas

    click.echo(json.dumps(getattr(file_schemas, f"{file}_schema")(), indent=2))
