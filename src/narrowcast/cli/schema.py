"""`narrowcast schema`."""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("file", type=click.Choice(["experiment", "solve", "study"]), default="experiment")
def schema(file: str) -> None:
    """Print the JSON Schema of an experiment, solve or study file, for editors that complete and check YAML.

    \b
    narrowcast schema > experiment.schema.json

    Then write this as the first line of an experiment file in the same folder:
    # yaml-language-server: $schema=experiment.schema.json
    """  # noqa: D301 - click wants the character
    from narrowcast.reference.file_schemas import experiment_schema, solve_schema, study_schema

    schemas = {"experiment": experiment_schema, "solve": solve_schema, "study": study_schema}
    click.echo(json.dumps(schemas[file](), indent=2))
