"""Resources that the client hosts of a run request; importing this imports neither Ray nor torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator

from narrowcast.platform.config.files import Section
from narrowcast.platform.errors import UserError


class HostResources(Section):
    """The number of client hosts, and the resources that each needs on its node."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["ray"] = "ray"
    actors: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = Field(
        2,
        description="client hosts; auto: as many as fit on the nodes at the time, at most one per chunk",
    )
    clients_per_actor: int | None = Field(None, ge=1, description="in place of actors: clients of a round per host")
    cpus_per_actor: float = Field(1.0, ge=0, description="CPUs per client host")
    gpus_per_actor: float = Field(0.0, ge=0, description="GPUs per client host; 0.5 lets two share one")
    resources_per_actor: dict[str, float] = Field({}, description="custom resources per client host, such as {edge: 1}")

    @field_validator("resources_per_actor")
    @classmethod
    def _are_custom(cls, value: dict[str, float]) -> dict[str, float]:
        for name, amount in value.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory") or not 0 < amount <= 1e6:
                raise ValueError(f"{name}: {amount:g}: give custom resources, each above 0; CPUs and GPUs have fields")
        return value

    @property
    def least_actors(self) -> int:
        """The least number of hosts that a round needs, as far as known before the cohort is drawn."""
        return 1 if self.actors == "auto" or self.clients_per_actor is not None else self.actors

    def need(self) -> dict[str, float]:
        """Return what a client host needs on its node, by the names of Ray's resources."""
        return {"CPU": self.cpus_per_actor, "GPU": self.gpus_per_actor, **self.resources_per_actor}


def check_address_of(backend: str | None, address: str | None) -> None:
    """Raise `UserError` for the address of a cluster that a local backend would not join."""
    if backend == "local" and address is not None:
        raise UserError(f"--backend local runs in this process, and --address {address} on Ray; leave out one of them")
