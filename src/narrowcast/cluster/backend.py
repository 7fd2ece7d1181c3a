"""The Ray backend: what a run requests of a cluster; importing this does not import Ray."""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import ConfigDict, Field

from narrowcast.cluster import RAY_SETTINGS
from narrowcast.cluster.decisions import FailurePolicy, HostResources, Node, Policy, Reaction
from narrowcast.cluster.ray_internals import latest_address, on_this_machine_only
from narrowcast.cluster.ray_token import check_token, ensure_token
from narrowcast.cluster.worker_pool import JobFunction, WorkerPool
from narrowcast.platform.config.files import suggest
from narrowcast.platform.config.plugins import check_installed
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.loop import Backend
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Buffered
from narrowcast.platform.rounds.sampling import cohort_size
from narrowcast.platform.rounds.state import Run, RunState


class RayBackend(Backend, HostResources):
    """Client hosts and the driver as Ray actors, on a cluster that is started for the run or joined.

    Without `address`, the cluster of a surrounding Ray job (RAY_ADDRESS) is used, else one is started on this machine
    and stopped at the end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    placement: Policy = Field(
        "spread", description="spread: hosts evenly over the nodes; pack: on as few nodes as possible"
    )
    address: str | None = Field(None, description="host:port of a running cluster, or auto")
    on_failure: Reaction = Field(
        "redo", description="clients of a failed host: redo trains them elsewhere, drop counts them as stragglers"
    )
    max_failures: int = Field(20, ge=0, description="failures of hosts or nodes that a run tolerates")
    round_timeout_seconds: float = Field(
        600.0, gt=0, description="a host that does not answer within this time is replaced"
    )
    placement_timeout_seconds: float = Field(120.0, gt=0, description="wait for a first host to start")

    @property
    def repeats_rounds(self) -> bool:
        """Not with `on_failure: drop`, which leaves out the clients of a host that fails."""
        return self.on_failure != "drop"

    def check(self, run: Run) -> None:
        """Join the cluster once; raise `UserError` within seconds if it does not answer or is too small."""
        self.check_installed()
        if run.task.training.device == "cuda" and not self.gpus_per_actor:
            raise UserError("training.device = cuda: client hosts have no GPU; set backend.gpus_per_actor=0.5")
        if self.clients_per_actor is not None and run.plan.chunk_size > self.clients_per_actor:
            raise UserError(
                f"backend.clients_per_actor = {self.clients_per_actor}: a host trains whole chunks, and chunk_size is "
                f"{run.plan.chunk_size}; set chunk_size={self.clients_per_actor} too"
            )
        self._check_room(self._hosts(run), self._local_cpus(run), "client hosts", "backend.actors")

    def check_installed(self) -> None:
        """Raise `UserError` unless Ray is installed."""
        check_installed("ray", "backend.kind = ray (--backend local runs in this process)")

    def check_workers(self, field: str) -> None:
        """Do the same for `actors` workers, of which `field` has the number."""
        check_installed("ray", f"{field} on Ray")
        assert self.actors != "auto"
        self._check_room(self.actors, self._cpus_for(self.actors), "workers", field)

    def _check_room(self, hosts: int, local_cpus: int, what: str, field: str) -> None:
        check_token()
        address = self._address()
        if address == "local":
            resources = {"CPU": local_cpus, "GPU": torch.cuda.device_count()}
            self._fits(hosts, [Node("", resources)], "this machine", what, field)
            return
        with RAY_SETTINGS.in_force():
            from narrowcast.cluster.session import alive_nodes, probe

            probe(address)
            with self.cluster(1):
                nodes = alive_nodes()
        self._fits(hosts, nodes, f"the cluster at {address}", what, field)

    def _hosts(self, run: Run) -> int:
        """Return the number of client hosts that the run asks for."""
        plan, schedule = run.plan, run.plan.schedule
        cohort = (
            schedule.buffer_size
            if isinstance(schedule, Buffered)
            else cohort_size(plan.clients_per_round, plan.over_selection, run.task.data.n_clients)
        )
        if self.clients_per_actor is not None:
            return -(-cohort // self.clients_per_actor)
        return -(-cohort // plan.chunk_size) if self.actors == "auto" else self.actors

    def _fits(self, hosts: int, nodes: Sequence[Node], where: str, what: str, field: str) -> None:
        offered = {kind for node in nodes for kind, amount in node.offers.items() if amount}
        for name in self.resources_per_actor:
            if name not in offered:
                raise UserError(
                    f'backend.resources_per_actor: {where} offers no "{name}", only {", ".join(sorted(offered))}; '
                    f"start a node with ray start --resources='{{\"{name}\": 1}}'{suggest(name, offered)}"
                )
        needed = 1 if self.actors == "auto" and self.clients_per_actor is None else hosts
        if (capacity := sum(node.room_for(self.need(), hosts) for node in nodes)) < needed:
            need = " and ".join(f"{amount:g} {kind}" for kind, amount in self.need().items() if amount)
            raise UserError(
                f"{hosts} {what} that need {need} each: {where} has room for {capacity}; lower {field} or what "
                "each needs" + (", or set backend.actors=auto" if field == "backend.actors" else "")
            )

    def run(self, run: Run, state: RunState) -> Generator[Outcome, None, None]:
        """Run the rounds after `state`; if the driver dies, start another from the last state that was kept."""
        policy = FailurePolicy(self.on_failure, self.max_failures, self.round_timeout_seconds)
        with self.cluster(self._local_cpus(run)):
            from narrowcast.cluster.session import PlacementRequest, run_rounds

            request = PlacementRequest(self._hosts(run), self.need(), self.placement, self.placement_timeout_seconds)
            yield from run_rounds(run, state, policy, request)

    def _local_cpus(self, run: Run) -> int:
        """Return the CPUs that a cluster on this machine declares: enough for all hosts, which share the real ones."""
        if self.actors == "auto" and self.clients_per_actor is None:
            return os.cpu_count() or 1
        return self._cpus_for(self._hosts(run))

    def _cpus_for(self, hosts: int) -> int:
        return max(os.cpu_count() or 1, math.ceil(hosts * self.cpus_per_actor))

    def _address(self) -> str:
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        if address != "auto":
            return address
        running = os.environ.get("RAY_ADDRESS", "auto").replace("auto", "") or latest_address()
        if running is None:
            raise UserError(
                'backend.address = "auto": no Ray cluster runs on this machine; start one with ray start --head, or '
                "give its host:port"
            )
        return running

    @contextmanager
    def worker_pool(self, function: JobFunction, shared: Any) -> Iterator[WorkerPool]:
        """Start `actors` workers for jobs, on a cluster that is started or joined for them."""
        assert self.actors != "auto"
        with self.cluster(self._cpus_for(self.actors)):
            from narrowcast.cluster.ray_worker_pool import RayWorkerPool

            yield RayWorkerPool(function, shared, self.actors, cpus=self.cpus_per_actor, gpus=self.gpus_per_actor)

    @contextmanager
    def cluster(self, local_cpus: int) -> Iterator[None]:
        """Start a cluster here with this number of CPUs, or join one; raise `UserError` if that fails."""
        with RAY_SETTINGS.in_force():
            from narrowcast.cluster.session import joined

            address = self._address()
            if address != "local":
                check_token()
                with joined(address, {}):
                    yield
                return
            ensure_token()
            local = {"num_cpus": local_cpus, "include_dashboard": False}
            with on_this_machine_only() as private, joined(address, {**local, **private}):
                yield
