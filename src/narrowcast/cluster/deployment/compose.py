"""The Compose file: head, workers, and an MLflow server with PostgreSQL and an object store for artifacts."""

from __future__ import annotations

import json
from typing import Any

from narrowcast.cluster.deployment.description import Deployment, NodeDescription, Workers

_SECRETS = ("ray_token", "postgres_password", "object_store")
_SECRET_FOLDER = "/run/secrets"


def compose(deployment: Deployment) -> dict[str, Any]:
    """Return the Compose file. Its secrets are files in ./secrets; its ports are published on 127.0.0.1 only."""
    on_disk = deployment.mlflow.artifacts.startswith(("/", "file:"))
    services = {"postgres": _postgres(deployment), "mlflow": _mlflow(deployment), "head": _head(deployment)}
    services |= {each.name: _workers(deployment, each) for each in deployment.workers}
    names = [each for each in _SECRETS if each != "object_store" or not on_disk]
    return {
        "name": deployment.name,
        "services": services,
        "volumes": {"postgres": {}, **({"artifacts": {}} if on_disk else {}), **_volumes(deployment)},
        "secrets": {name: {"file": f"./secrets/{name}"} for name in names},
    }


def _volumes(deployment: Deployment) -> dict[str, Any]:
    return {disk.volume: {"name": disk.volume} for disk in (deployment.runs, deployment.data)}


def _postgres(deployment: Deployment) -> dict[str, Any]:
    return {
        "image": deployment.mlflow.postgres_image,
        "environment": {
            "POSTGRES_USER": "mlflow",
            "POSTGRES_DB": "mlflow",
            "POSTGRES_PASSWORD_FILE": f"{_SECRET_FOLDER}/postgres_password",
        },
        "secrets": ["postgres_password"],
        "volumes": ["postgres:/var/lib/postgresql/data"],
        "healthcheck": _check("pg_isready -U mlflow"),
        "restart": "unless-stopped",
    }


def _mlflow(deployment: Deployment) -> dict[str, Any]:
    server = deployment.mlflow
    hosts = ",".join(f"{host}:{server.port}" for host in ("mlflow", "localhost", "127.0.0.1"))
    on_disk = server.artifacts.startswith(("/", "file:"))
    environment = {"MLFLOW_DISABLE_TELEMETRY": "true"}
    if not on_disk:
        environment["AWS_SHARED_CREDENTIALS_FILE"] = f"{_SECRET_FOLDER}/object_store"
    if server.object_store_endpoint is not None:
        environment["MLFLOW_S3_ENDPOINT_URL"] = server.object_store_endpoint
    # The password is read in the container, so that this file, `docker inspect` and the list of processes lack it.
    database = f"postgresql://mlflow:$$(cat {_SECRET_FOLDER}/postgres_password)@postgres/mlflow"
    command = (
        f'export MLFLOW_BACKEND_STORE_URI="{database}"; exec mlflow server --host 0.0.0.0 --port {server.port} '
        f'--workers {server.workers} --allowed-hosts "{hosts}" --artifacts-destination "{server.artifacts}"'
    )
    return {
        "image": deployment.image,
        "command": ["sh", "-c", command],
        "environment": environment,
        "secrets": ["postgres_password", *([] if on_disk else ["object_store"])],
        "ports": [f"127.0.0.1:{server.port}:{server.port}"],
        "depends_on": {"postgres": {"condition": "service_healthy"}},
        **({"volumes": [f"artifacts:{server.artifacts.removeprefix('file://')}"]} if on_disk else {}),
        "healthcheck": _check(f"wget -qO- http://127.0.0.1:{server.port}/health"),
        "restart": "unless-stopped",
    }


def _head(deployment: Deployment) -> dict[str, Any]:
    start = [
        "ray",
        "start",
        "--head",
        "--block",
        "--port=6379",
        "--dashboard-host=0.0.0.0",
        "--metrics-export-port=8080",
    ]
    node = _node(deployment, deployment.head, start)
    return {**node, "ports": ["127.0.0.1:8265:8265"], "depends_on": {"mlflow": {"condition": "service_healthy"}}}


def _workers(deployment: Deployment, workers: Workers) -> dict[str, Any]:
    start = ["ray", "start", "--block", "--address=head:6379", "--metrics-export-port=8080"]
    node = _node(deployment, workers, start)
    node["deploy"] = {"replicas": workers.count, **node["deploy"]}
    return {**node, "depends_on": {"head": {"condition": "service_started"}}}


def _node(deployment: Deployment, node: NodeDescription, start: list[str]) -> dict[str, Any]:
    limits: dict[str, Any] = {"cpus": str(max(node.cpus, 1)), "memory": f"{node.memory_gib}g"}
    reserved = [{"driver": "nvidia", "count": node.gpus, "capabilities": ["gpu"]}] if node.gpus else []
    resources = {"limits": limits, **({"reservations": {"devices": reserved}} if reserved else {})}
    # The file has the owner and the mode that it has on the host, which may not be those that Ray's token needs.
    with_token = ["sh", "-c", f'export RAY_AUTH_TOKEN="$$(cat {_SECRET_FOLDER}/ray_token)"; exec "$$@"', "sh"]
    given = ["--disable-usage-stats", f"--num-cpus={node.cpus}", f"--num-gpus={node.gpus}"]
    if node.resources:
        given.append(f"--resources={json.dumps(node.resources)}")
    return {
        "image": deployment.image,
        "command": [*with_token, *start, *given],
        "environment": {
            **deployment.environment(),
            "MLFLOW_TRACKING_URI": f"http://mlflow:{deployment.mlflow.port}",
        },
        "secrets": ["ray_token"],
        "volumes": [f"{disk.volume}:{disk.path}" for disk in (deployment.runs, deployment.data)],
        "shm_size": f"{max(1, node.memory_gib // 3)}g",  # Ray keeps objects in a third of the memory
        "stop_grace_period": "150s",
        "restart": "unless-stopped",
        "deploy": {"resources": resources},
    }


def _check(command: str) -> dict[str, Any]:
    return {"test": ["CMD-SHELL", command], "interval": "5s", "timeout": "5s", "retries": 30}
