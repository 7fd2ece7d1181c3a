"""The description of a cluster: its nodes, its disks, where runs are tracked, and where its secrets lie."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from narrowcast import __version__

Name = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,48}[a-z0-9])?$")]
"""What Kubernetes and Docker both take as a name."""

Resource = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NodeDescription(_Part):
    """One node: what Ray may use of it."""

    cpus: int = Field(2, ge=0, le=1024, description="CPUs for Ray; 0 keeps client hosts off the node")
    gpus: int = Field(0, ge=0, le=64)
    memory_gib: int = Field(8, ge=1, le=16384)
    resources: dict[Resource, float] = Field({}, description="custom resources of Ray, such as {link: 1}")


class Workers(NodeDescription):
    """Nodes that are alike."""

    name: Name = "workers"
    count: int = Field(3, ge=0, le=10_000)


class Disk(_Part):
    """A folder that every node sees: a claim on Kubernetes, a named volume with Compose, a path on plain machines."""

    path: str = Field(pattern=r"^/\S+$")
    volume: Name


class SecretKey(_Part):
    """A secret by reference: never its value."""

    secret: Name
    key: str = Field(pattern=r"^[A-Za-z0-9._-]+$")


class MlflowServer(_Part):
    """The MLflow server of a Compose deployment."""

    port: int = Field(5000, ge=1, le=65535)
    workers: int = Field(2, ge=1)
    postgres_image: str = "postgres:17"
    artifacts: str = Field("s3://narrowcast/mlflow", pattern=r"^(s3|gs|wasbs|abfss|hdfs|file)://\S+$|^/\S+$")
    object_store_endpoint: str | None = Field(None, description="of an S3-compatible store that is not AWS")


class Machines(_Part):
    """Machines that Ray's launcher reaches by SSH."""

    user: str = "ubuntu"
    private_key: str = "~/.ssh/id_ed25519"
    head: str = "head.example.org"
    workers: tuple[str, ...] = ("worker-1.example.org", "worker-2.example.org")
    container: bool = Field(True, description="start the image there; false: what the user's login shell has")


class Deployment(_Part):
    """A Ray cluster that runs narrowcast, and what belongs to it."""

    name: Name = "narrowcast"
    image: str = Field(f"narrowcast:{__version__}", pattern=r"^\S+$")
    base_image: str = Field("python:3.11-slim-bookworm", pattern=r"^\S+$", description="of the Dockerfile")
    namespace: Name = "default"
    ray_version: str = Field(version("ray"), pattern=r"^\d+\.\d+\.\d+$", description="must be the image's")
    head: NodeDescription = NodeDescription(cpus=0, memory_gib=8)
    workers: tuple[Workers, ...] = Field((Workers(),), min_length=1)
    runs: Disk = Disk(path="/runs", volume="narrowcast-runs")
    data: Disk = Disk(path="/data", volume="narrowcast-data")
    tracking_uri: SecretKey | None = Field(
        SecretKey(secret="narrowcast-mlflow", key="uri"), description="holds MLFLOW_TRACKING_URI for Kubernetes"
    )
    service_account: Name | None = None
    log_format: Literal["text", "json"] = "json"
    mlflow: MlflowServer = MlflowServer()
    machines: Machines = Machines()

    @field_validator("workers")
    @classmethod
    def _named_apart(cls, value: tuple[Workers, ...]) -> tuple[Workers, ...]:
        names = [each.name for each in value]
        if len(set(names)) < len(names):
            raise ValueError("two groups have the same name; give each its own")
        return value

    @property
    def gpus(self) -> bool:
        """Whether any node has a GPU."""
        return any(each.gpus for each in (self.head, *self.workers))

    def environment(self) -> dict[str, str]:
        """What every node's Ray is started with."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
            "NARROWCAST_DATA": self.data.path,
            "NARROWCAST_LOG_FORMAT": self.log_format,
        }
