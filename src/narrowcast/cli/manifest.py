"""`narrowcast manifest`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from ruamel.yaml import YAML

from narrowcast.cli.terminal import TRUST
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking.units import counted
from narrowcast.platform.trust import looking
from narrowcast.platform.yaml_limits import read_limited

if TYPE_CHECKING:
    from narrowcast.cluster.deployment.description import Deployment

_KINDS = ("raycluster", "rayjob", "launcher", "dockerfile", "compose", "description")


@click.command()
@click.argument("kind", metavar="KIND", type=click.Choice(_KINDS))
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@click.option("--from", "source", type=click.Path(path_type=Path), help="Description of the cluster, a YAML file.")
@click.option("--experiment", help="Experiment of a rayjob: a YAML file, or the name of a packaged one.")
@TRUST
def manifest(
    kind: str, overrides: tuple[str, ...], source: Path | None, experiment: str | None, *, trust: bool
) -> None:
    """Print a deployment file of this KIND, generated from one description of the cluster.

    A rayjob brings the modules of the experiment's own classes, and files that it names, but no data.

    \b
    narrowcast manifest description > cluster.yaml           all settings with their defaults; edit this file
    narrowcast manifest dockerfile --from cluster.yaml > Dockerfile
    narrowcast manifest compose --from cluster.yaml > compose.yaml
    narrowcast manifest raycluster --from cluster.yaml | kubectl apply -f -
    narrowcast manifest rayjob --from cluster.yaml --experiment scolr-ml1m | kubectl apply -f -
    narrowcast manifest launcher --from cluster.yaml > launcher.yaml

    Override a setting by its dotted path, such as workers.0.count=8. Secrets are referenced by name, never written.
    """  # noqa: D301 - click wants the character
    from narrowcast.cluster.deployment.compose import compose
    from narrowcast.cluster.deployment.description import Deployment
    from narrowcast.cluster.deployment.dockerfile import dockerfile
    from narrowcast.cluster.deployment.kuberay import ray_cluster, ray_job
    from narrowcast.cluster.deployment.launcher import launcher
    from narrowcast.platform.config import read_yaml, validate
    from narrowcast.platform.overrides import Defaults, apply_overrides

    if (kind == "rayjob") != (experiment is not None):
        raise UserError(
            "a rayjob needs an experiment; name it with --experiment"
            if kind == "rayjob"
            else f"--experiment is for a rayjob; leave it out for a {kind}"
        )
    given = {} if source is None else read_yaml(_read(source), str(source))
    values = {**Deployment().model_dump(mode="json"), **given} if isinstance(given, Mapping) else given
    if isinstance(values, dict):
        values = apply_overrides(values, overrides, Defaults(Deployment))
    deployment = validate(Deployment, values, str(source or "description"))
    documents: list[Mapping[str, Any]]
    if kind == "dockerfile":
        click.echo(dockerfile(deployment), nl=False)
        return
    if kind == "rayjob":
        with looking(Path(str(experiment)).parent, trust=trust):
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


def _experiment(name_or_path: str, deployment: Deployment) -> tuple[str, dict[str, Any], dict[str, Path]]:
    """Return the run's name in the form that Kubernetes accepts, its configuration on the job's cluster, and its files.

    Files are those that the configuration names and the modules of its own classes, by their paths beside it.
    """
    from narrowcast.cluster.deployment.kuberay import CONFIG_FOLDER
    from narrowcast.cluster.ray_backend import RayBackend
    from narrowcast.experiment import load_experiment
    from narrowcast.platform import plugins
    from narrowcast.platform.config import PLUGINS
    from narrowcast.runs.submission import with_files

    experiment = load_experiment(name_or_path)
    if "backend" not in experiment.model_fields_set:
        experiment = load_experiment(name_or_path, ["backend=ray"])
    config, files = with_files(experiment, f"{CONFIG_FOLDER}/")
    files |= {f"{PLUGINS}/{path}": file for path, file in plugins.files_of(config).items()}
    if isinstance(backend := experiment.backend, RayBackend):
        config["backend"]["address"] = None
        capacity = sum(
            each.count * (each.cpus // backend.cpus_per_actor) for each in deployment.workers if backend.cpus_per_actor
        )
        if backend.cpus_per_actor and capacity < backend.least_actors:
            raise UserError(
                f"backend.actors = {backend.actors} with {backend.cpus_per_actor:g} CPUs each: the described workers "
                f"have room for {capacity:g}; lower backend.actors, or raise workers.0.count or workers.0.cpus"
            )
    else:
        click.echo(
            f"warning: {name_or_path} has backend: {backend.kind}, so that its clients train on the head, which has "
            f"{counted(deployment.head.cpus, 'CPU')}, and the workers do nothing; set backend: ray",
            err=True,
        )
    return experiment.name.lower().replace("_", "-").replace(".", "-"), config, files


def _read(path: Path) -> str:
    try:
        return read_limited(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read as a cluster description: {error}") from error
