"""`narrowcast manifest`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import click
from ruamel.yaml import YAML

from narrowcast.platform.errors import UserError
from narrowcast.platform.yaml_limits import read_limited

_KINDS = ("raycluster", "dockerfile", "description")


@click.command()
@click.argument("kind", metavar="KIND", type=click.Choice(_KINDS))
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@click.option("--from", "source", type=click.Path(path_type=Path), help="Description of the cluster, a YAML file.")
def manifest(kind: str, overrides: tuple[str, ...], source: Path | None) -> None:
    """Print a deployment file of this KIND, generated from one description of the cluster.

    \b
    narrowcast manifest description > cluster.yaml           all settings with their defaults; edit this file
    narrowcast manifest dockerfile --from cluster.yaml > Dockerfile
    narrowcast manifest raycluster --from cluster.yaml | kubectl apply -f -

    Override a setting by its dotted path, such as workers.0.count=8. Secrets are referenced by name, never written.
    Files for a single job on Kubernetes, Docker Compose and Ray's launcher are in the folder deploy of the repository.
    """  # noqa: D301 - click wants the character
    from narrowcast.cluster.deployment.description import Deployment
    from narrowcast.cluster.deployment.dockerfile import dockerfile
    from narrowcast.cluster.deployment.kuberay import ray_cluster
    from narrowcast.platform.config import read_yaml, validate
    from narrowcast.platform.overrides import Defaults, apply_overrides

    given = {} if source is None else read_yaml(_read(source), str(source))
    values = {**Deployment().model_dump(mode="json"), **given} if isinstance(given, Mapping) else given
    if isinstance(values, dict):
        values = apply_overrides(values, overrides, Defaults(Deployment))
    deployment = validate(Deployment, values, str(source or "description"))
    if kind == "dockerfile":
        click.echo(dockerfile(deployment), nl=False)
        return
    yaml = YAML(pure=True)
    yaml.width = 4096
    yaml.representer.ignore_aliases = lambda *_: True
    yaml.dump(ray_cluster(deployment) if kind == "raycluster" else deployment.model_dump(mode="json"), sys.stdout)


def _read(path: Path) -> str:
    try:
        return read_limited(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read as a cluster description: {error}") from error
