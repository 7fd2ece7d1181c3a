"""From one description of a cluster and its image to a KubeRay manifest and a Dockerfile.

The manifest is for the KubeRay operator, version 1.5.1 or later, the first that distributes Ray's tokens. The image of
every node is built from a checkout of narrowcast.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from narrowcast._version import __version__
from narrowcast.cluster.ray_jobs import STOP_SECONDS
from narrowcast.platform.config.fields import Matches

Name = Annotated[
    str,
    Matches(
        r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?",
        "should have at most 50 lower-case letters, digits and '-', a letter first",
    ),
]
"""A name that both Kubernetes and Docker accept."""

Resource = Annotated[
    str,
    Matches(r"[A-Za-z][A-Za-z0-9_.-]*", "should begin with a letter, and have only letters, digits, '.', '_' and '-'"),
]

Image = Annotated[str, Matches(r"\S+", "should be the name of an image, without spaces")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NodeDescription(_Part):
    """One node: the resources that Ray may use there."""

    cpus: int = Field(2, ge=0, le=1024, description="CPUs for Ray; 0 keeps client hosts off the node")
    gpus: int = Field(0, ge=0, le=64)
    memory_gib: int = Field(8, ge=1, le=16384)
    resources: dict[Resource, float] = Field({}, description="custom resources of Ray, such as {link: 1}")


class Workers(NodeDescription):
    """A group of equal nodes."""

    name: Name = "workers"
    count: int = Field(3, ge=0, le=10_000)


class Disk(_Part):
    """A shared folder: a claim on Kubernetes."""

    path: Annotated[str, Matches(r"/\S+", "should be an absolute path without spaces")]
    volume: Name


class SecretKey(_Part):
    """A reference to a secret, never its value."""

    secret: Name
    key: Annotated[str, Matches(r"[A-Za-z0-9._-]+", "should have only letters, digits, '.', '_' and '-'")]


class Deployment(_Part):
    """A Ray cluster for narrowcast."""

    name: Name = "narrowcast"
    image: Image = f"narrowcast:{__version__}"
    base_image: Image = Field(
        "python:3.11-slim-bookworm",
        description="base image of the Dockerfile; NAME@sha256:... for one that never changes",
    )
    namespace: Name = "default"
    ray_version: Annotated[str, Matches(r"\d+\.\d+\.\d+", "should be three numbers, such as 2.40.0")] = Field(
        version("ray"), description="must be that of the image"
    )
    head: NodeDescription = NodeDescription(cpus=0, memory_gib=8)
    workers: tuple[Workers, ...] = Field((Workers(),), min_length=1)
    runs: Disk = Disk(path="/runs", volume="narrowcast-runs")
    data: Disk = Disk(path="/data", volume="narrowcast-data")
    tracking_uri: SecretKey | None = Field(
        SecretKey(secret="narrowcast-mlflow", key="uri"), description="Kubernetes secret that holds MLFLOW_TRACKING_URI"
    )
    service_account: Name | None = None
    log_format: Literal["text", "json"] = "json"

    @field_validator("workers")
    @classmethod
    def _named_apart(cls, value: tuple[Workers, ...]) -> tuple[Workers, ...]:
        names = [entry.name for entry in value]
        if len(set(names)) < len(names):
            raise ValueError("two groups have the same name; give each a different one")
        return value

    @property
    def gpus(self) -> bool:
        """True if any node has a GPU."""
        return any(worker.gpus for worker in (self.head, *self.workers))

    def environment(self) -> dict[str, str]:
        """Return the environment variables of Ray on every node."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
            "NARROWCAST_DATA": self.data.path,
            "NARROWCAST_LOG_FORMAT": self.log_format,
        }


def ray_cluster(deployment: Deployment) -> dict[str, Any]:
    """Return the manifest of a permanent cluster, for `narrowcast submit`."""
    labels = {"app.kubernetes.io/name": "narrowcast", "app.kubernetes.io/instance": deployment.name}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": deployment.name, "namespace": deployment.namespace, "labels": labels},
        "spec": _cluster_spec(deployment),
    }


def _cluster_spec(deployment: Deployment) -> dict[str, Any]:
    head = deployment.head
    return {
        "rayVersion": deployment.ray_version,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": str(head.cpus), **_resources(head)},
            "template": _pod(deployment, head, "ray-head", {"gcs": 6379, "dashboard": 8265, "metrics": 8080}),
        },
        "workerGroupSpecs": [_group(deployment, worker) for worker in deployment.workers],
    }


def _group(deployment: Deployment, workers: Workers) -> dict[str, Any]:
    return {
        "groupName": workers.name,
        "replicas": workers.count,
        "minReplicas": workers.count,
        "maxReplicas": workers.count,
        "rayStartParams": {"num-cpus": str(workers.cpus), **_resources(workers)},
        "template": _pod(deployment, workers, "ray-worker", {"metrics": 8080}),
    }


def _resources(node: NodeDescription) -> dict[str, str]:
    """Return custom resources quoted twice, since `ray start` reads them from a shell."""
    return {"resources": json.dumps(json.dumps(node.resources))} if node.resources else {}


def _pod(deployment: Deployment, node: NodeDescription, container: str, ports: Mapping[str, int]) -> dict[str, Any]:
    environment: list[dict[str, Any]] = [
        # KubeRay sets the mode and the token itself.
        {"name": name, "value": value}
        for name, value in deployment.environment().items()
        if name != "RAY_AUTH_MODE"
    ]
    if (uri := deployment.tracking_uri) is not None:
        reference = {"secretKeyRef": {"name": uri.secret, "key": uri.key}}
        environment.append({"name": "MLFLOW_TRACKING_URI", "valueFrom": reference})
    amounts = {"cpu": str(max(node.cpus, 1)), "memory": f"{node.memory_gib}Gi"}
    if node.gpus:
        amounts["nvidia.com/gpu"] = str(node.gpus)
    disks = {"runs": deployment.runs, "data": deployment.data}
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": STOP_SECONDS + 30,
        "automountServiceAccountToken": deployment.service_account is not None,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "containers": [
            {
                "name": container,
                "image": deployment.image,
                "env": environment,
                "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
                "resources": {"requests": amounts, "limits": amounts},
                "securityContext": {"allowPrivilegeEscalation": False},
                "volumeMounts": [{"name": name, "mountPath": disk.path} for name, disk in disks.items()],
            }
        ],
        "volumes": [
            {"name": name, "persistentVolumeClaim": {"claimName": disk.volume}} for name, disk in disks.items()
        ],
    }
    if deployment.service_account is not None:
        spec["serviceAccountName"] = deployment.service_account
    return {"spec": spec}


_CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu "
_TEMPLATE = """\
# The image of every node, made by: narrowcast manifest dockerfile
# Build it where pyproject.toml is: docker build -t {image} -f Dockerfile .
# For an image that can be built again as it was, give base_image by digest: python@sha256:...
FROM {base}

# KubeRay's probes call wget, Ray's launcher calls rsync.
RUN apt-get update \\
 && apt-get install --yes --no-install-recommends rsync wget \\
 && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 ray \\
 && install --directory --owner=ray {runs} {data}

WORKDIR /opt/narrowcast
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY locks locks
# Every file is checked against its sha256 in the lock{and_then}.
RUN pip install --no-cache-dir {index}--require-hashes --no-deps -r locks/runtime.txt -r locks/torch-{build}.txt
COPY src src
RUN pip install --no-cache-dir --no-build-isolation {rest} ".[cluster,server,he,ui]"

USER ray
WORKDIR /home/ray
ENV PYTHONUNBUFFERED=1 {environment}
EXPOSE 6379 8265
CMD ["ray", "start", "--head", "--block"]
"""


def dockerfile(deployment: Deployment) -> str:
    """Return the Dockerfile; without GPUs, torch is installed from its index of CPU builds, which are smaller."""
    return _TEMPLATE.format(
        image=deployment.image,
        base=deployment.base_image,
        runs=deployment.runs.path,
        data=deployment.data.path,
        index="" if deployment.gpus else _CPU_INDEX,
        and_then=", but for CUDA's libraries: torch names their versions" if deployment.gpus else "",
        build="cuda" if deployment.gpus else "cpu",
        rest="--constraint constraints.txt" if deployment.gpus else "--no-deps",
        environment=" ".join(f"{name}={value}" for name, value in deployment.environment().items()),
    )
