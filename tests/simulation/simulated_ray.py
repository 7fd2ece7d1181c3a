"""Ray in this thread: the driver, the hosts and the policy are the real ones, and actors die as the seed says.

Every call of an actor is made when its result is asked for. Time is that of `narrowcast.platform.storage.host`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    GetTimeoutError,
    ObjectLostError,
    RayError,
    RayTaskError,
)
from simulated_host import KilledError, PowerCutError, SimulatedHost

from narrowcast.cluster import executor, hosts, session
from narrowcast.cluster import hosts as key_service
from narrowcast.platform.storage.host import host_clock

_PASSED_ON = (KeyboardInterrupt, KilledError, PowerCutError, AssertionError)


class _HangsError(Exception):
    """The call has no answer, and never will."""


@dataclass(eq=False)
class _Reference:
    """An object of the store, or the pending answer of an actor."""

    actor: _Actor | None
    call: Any
    answered: bool = False
    value: Any = None
    error: RayError | None = None

    def settle(self) -> None:
        if self.answered:
            return
        if self.actor is not None and not self.actor.alive:
            self.answered, self.error = True, self.actor.error
            return
        if self.actor is not None and self.actor.hung:
            return
        self.answered = True
        try:
            self.value = self.call()
        except _HangsError:
            self.answered = False
        except RayError as error:
            self.error = error
        except _PASSED_ON:
            raise
        except Exception as error:
            self.error = RayTaskError("call", "", error)


@dataclass(eq=False)
class _Actor:
    """An instance of an actor's class on a node."""

    ray: SimulatedRay
    name: str
    node: str
    instance: Any = None
    alive: bool = True
    error: RayError = field(default_factory=ActorDiedError)
    hung: bool = False

    def __getattr__(self, method: str) -> _Method:
        return _Method(self, method)


@dataclass(frozen=True)
class _Method:
    actor: _Actor
    name: str

    def options(self, **_: Any) -> _Method:
        return self

    def remote(self, *arguments: Any) -> Any:
        ray, actor = self.actor.ray, self.actor
        if actor.name == "Driver" and self.name == "run":
            return _Stream(actor, iter(actor.instance.run(*arguments)))

        def call() -> Any:
            ray.strike(actor, self.name)
            return getattr(actor.instance, self.name)(*ray.resolved(arguments))

        reference = _Reference(actor, call)
        if self.name == "stop":  # nothing waits for it
            reference.settle()
        return reference


@dataclass(eq=False)
class _Stream:
    """The batches of a driver, which may be some rounds ahead of the reader, and die with these."""

    driver: _Actor
    batches: Iterator[Any]
    ahead: list[_Reference] = field(default_factory=list)

    def __next__(self) -> _Reference:
        ray = self.driver.ray
        if not self.ahead:
            if not self.driver.alive or ray.driver_dies():
                self.driver.alive = False
                reference = _Reference(self.driver, None, answered=True, error=ActorDiedError())
                return reference
            for _ in range(ray.chances.choice((1, 1, 2, 4))):
                try:
                    batch = next(self.batches)
                except StopIteration:
                    break
                except _PASSED_ON:
                    raise
                except Exception as error:
                    failed = _Reference(self.driver, None, answered=True, error=RayTaskError("run", "", error))
                    self.ahead.append(failed)
                    break
                self.ahead.append(_Reference(self.driver, None, answered=True, value=batch))
            if not self.ahead:
                raise StopIteration
        return self.ahead.pop(0)


@dataclass(frozen=True)
class _ActorClass:
    """The class of an actor, which is placed on the node that its strategy names."""

    ray: SimulatedRay
    original: Any
    node: str = ""

    def options(self, scheduling_strategy: Any = None, **_: Any) -> _ActorClass:
        return _ActorClass(self.ray, self.original, getattr(scheduling_strategy, "node_id", ""))

    def remote(self, *arguments: Any) -> _Actor:
        made = self.original.__ray_metadata__.modified_class
        actor = _Actor(self.ray, made.__name__, self.node or self.ray.head)
        actor.alive = actor.node in self.ray.nodes_alive
        if actor.alive:
            actor.instance = made(*self.ray.resolved(arguments))
        else:
            actor.error = ActorUnschedulableError("the node that the strategy names is gone")
        self.ray.actors.append(actor)
        return actor


class SimulatedRay:
    """A head with two worker nodes, and the functions of `ray` that narrowcast calls.

    `failures`: the chance of each call to a host to kill it, its node, or to find its object lost or the host hung.
    """

    def __init__(self, host: SimulatedHost, failures: float) -> None:
        self._host, self._failures = host, failures
        self.chances: random.Random = host.chances("ray")
        self._names = (f"{number:056x}" for number in range(1, 10**6))
        self.head = next(self._names)
        self.nodes_alive = [self.head]
        self.actors: list[_Actor] = []

    # functions of ray

    def init(self, **_: Any) -> None:
        self.nodes_alive = [self.head, next(self._names), next(self._names)]
        self.actors = []

    def shutdown(self) -> None:
        self.actors = []

    def put(self, value: Any) -> _Reference:
        return _Reference(None, None, answered=True, value=value)

    def get(self, references: Any, timeout: float | None = None) -> Any:
        if isinstance(references, _Reference):
            return self._value(references, timeout)
        return [self._value(each, timeout) for each in references]

    def _value(self, reference: _Reference, timeout: float | None) -> Any:
        reference.settle()
        if not reference.answered:
            assert timeout is not None, "this call would wait for ever"
            host_clock().sleep(timeout)
            raise GetTimeoutError
        if reference.error is not None:
            raise reference.error
        return reference.value

    def wait(
        self, references: Sequence[Any], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Return those that have an answer, in an order drawn from the seed."""
        answered: list[Any] = []
        for each in self.chances.sample(list(references), len(references)):
            if isinstance(each, _Reference):
                each.settle()
            if isinstance(each, _Stream) or each.answered:
                answered.append(each)
            if len(answered) == num_returns:
                break
        if not answered:
            host_clock().sleep(timeout or 0)
        return answered, [each for each in references if each not in answered]

    def kill(self, actor: _Actor) -> None:
        actor.alive = False

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": name, "Alive": True, "Resources": {"CPU": 2.0}} for name in self.nodes_alive]

    def get_runtime_context(self) -> SimulatedRay:
        return self

    gcs_address = "127.0.0.1:1"

    def get_node_id(self) -> str:
        return self.head

    # accidents

    def resolved(self, arguments: Sequence[Any]) -> list[Any]:
        return [self.get(each) if isinstance(each, _Reference) else each for each in arguments]

    def strike(self, actor: _Actor, method: str) -> None:
        """Perhaps let a call to a host fail."""
        if actor.name != "ClientHost" or self.chances.random() >= self._failures:
            return
        how = self.chances.choice(("host", "host", "node", "hang", "object" if method == "train" else "host"))
        self._host.tell(f"ray: {how} fails at {method}")
        if how == "object":
            raise ObjectLostError("00" * 28, None, "")
        if how == "node" and actor.node != self.head:
            self.nodes_alive.remove(actor.node)
            for each in self.actors:
                each.alive = each.alive and each.node != actor.node
            if self.chances.random() < 0.7:
                self.nodes_alive.append(next(self._names))
        if how == "hang":
            actor.hung = True
            raise _HangsError
        actor.alive = False
        raise ActorDiedError

    def driver_dies(self) -> bool:
        dies = self.chances.random() < self._failures / 2
        if dies:
            self._host.tell("ray: the driver dies")
        return dies


class _Head:
    """The head of the cluster, which always answers."""

    def __init__(self, address: str) -> None:
        del address

    def check(self) -> None:
        pass

    wait = check


@contextmanager
def in_force(ray: SimulatedRay) -> Iterator[None]:
    """Put the simulated cluster in the place of Ray."""
    with ExitStack() as stack:
        for module in (executor, hosts, key_service, session, executor):
            stack.enter_context(patch.object(module, "ray", ray))
        for module, name in ((session, "Driver"), (hosts, "ClientHost"), (key_service, "KeyService")):
            stack.enter_context(patch.object(module, name, _ActorClass(ray, getattr(module, name))))
        stack.enter_context(patch.object(session, "Head", _Head))
        yield
