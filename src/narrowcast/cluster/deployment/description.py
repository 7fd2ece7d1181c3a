"""The description of a cluster and its image: nodes, disks and references to secrets."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from narrowcast._version import __version__
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
