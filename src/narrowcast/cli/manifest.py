"""`narrowcast manifest`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from ruamel.yaml import YAML

from narrowcast.platform.errors import UserError

if TYPE_CHECKING:
    from narrowcast.cluster.deployment.description import Deployment

_KINDS = ("raycluster", "rayjob", "launcher", "dockerfile", "compose", "description")


@click.command()
@click.argument("kind", type=click.Choice(_KINDS))
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@click.option("--from", "source", type=click.Path(path_type=Path), help="The cluster's description, a YAML file.")
@click.option("--experiment", help="What a rayjob runs: a YAML file, or the name of a packaged experiment.")
def manifest(kind: str, overrides: tuple[str, ...], source: Path | None, experiment: str | None) -> None:
    """Write the file that starts a cluster, of this KIND, from one description of the cluster.

    \b
    narrowcast manifest description > cluster.yaml           every setting with its default, to be edited
    narrowcast manifest dockerfile --from cluster.yaml > Dockerfile
    narrowcast manifest compose --from cluster.yaml > compose.yaml
    narrowcast manifest raycluster --from cluster.yaml | kubectl apply -f -
    narrowcast manifest rayjob --from cluster.yaml --experiment scolr-ml1m | kubectl apply -f -
    narrowcast manifest launcher --from cluster.yaml > launcher.yaml

    A setting can be overridden by its dotted path, such as workers.0.count=8. Secrets are named, never written.
    """  # noqa: D301 - click wants the character
    from narrowcast.cluster.deployment.compose import compose
    from narrowcast.cluster.deployment.description import Deployment
    from narrowcast.cluster.deployment.dockerfile import dockerfile
    from narrowcast.cluster.deployment.kuberay import ray_cluster, ray_job
    from narrowcast.cluster.deployment.launcher import launcher
    from narrowcast.platform.config import apply_overrides, read_yaml, validate

    if (kind == "rayjob") != (experiment is not None):
        raise UserError(f"--experiment is what a rayjob runs; {'give it' if kind == 'rayjob' else 'leave it out'} here")
    given = {} if source is None else read_yaml(_read(source), str(source))
    values = {**Deployment().model_dump(mode="json"), **given} if isinstance(given, Mapping) else given
    if isinstance(values, dict):
        values = apply_overrides(values, overrides)
    deployment = validate(Deployment, values, str(source or "description"))
    documents: list[Mapping[str, Any]]
    if kind == "dockerfile":
        click.echo(dockerfile(deployment), nl=False)
        return
    if kind == "rayjob":
        documents = [*ray_job(deployment, *_experiment(str(experiment), deployment))]
    elif kind == "raycluster":
        documents = [*ray_cluster(deployment)]
    elif kind == "description":
        documents = [deployment.model_dump(mode="json")]
    else:
        documents = [launcher(deployment) if kind == "launcher" else compose(deployment)]
    yaml = YAML(pure=True)
    yaml.width = 4096
    yaml.representer.ignore_aliases = lambda *_: True
    yaml.dump_all(documents, sys.stdout) if len(documents) > 1 else yaml.dump(documents[0], sys.stdout)


def _experiment(name_or_path: str, deployment: Deployment) -> tuple[str, dict[str, Any]]:
    """The run's name, as Kubernetes takes it, and its configuration on the cluster that the job brings."""
    from narrowcast.cluster.ray_backend import RayBackend
    from narrowcast.experiment import load_experiment

    experiment = load_experiment(name_or_path)
    config = experiment.plain()
    if isinstance(backend := experiment.backend, RayBackend):
        config["backend"]["address"] = None
        room = sum(
            each.count * (each.cpus // backend.cpus_per_actor) for each in deployment.workers if backend.cpus_per_actor
        )
        if backend.cpus_per_actor and room < backend.least_actors:
            raise UserError(
                f"backend.actors = {backend.actors} with {backend.cpus_per_actor:g} CPUs each: the described workers "
                f"have room for {room:g}; lower backend.actors, or raise workers.0.count or workers.0.cpus"
            )
    return experiment.name.lower().replace("_", "-").replace(".", "-"), config


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a description of a cluster: {error}") from error
