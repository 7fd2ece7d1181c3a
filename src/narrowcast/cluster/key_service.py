"""The actor that holds the clients' keys: hosts ask it for their clients' secrets, the driver to open a sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from narrowcast.platform.contracts import SecureSums
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.types import Arrays, PayloadError


@ray.remote(num_cpus=0)
class KeyService:
    """Holds the key store of a run in its own process, and dies with the driver that started it."""

    def __init__(self, secure: SecureSums, answered: Path | None) -> None:
        self._key_store = secure.key_store(answered)

    def call(self, method: str, round_index: int, arrays: Arrays) -> Arrays:
        """Return the key store's answer."""
        return self._key_store.call(method, round_index, arrays)


def start_key_service(secure: SecureSums, answered: Path | None) -> Any:
    """Start the key service on this node, which has the run's folder and the key files of a run with offline keys."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return KeyService.options(scheduling_strategy=here).remote(secure, answered)  # type: ignore[attr-defined]


class RemoteKeyStore:
    """The key store of a key service, for its driver and hosts."""

    def __init__(self, service: Any) -> None:
        self._service = service

    def call(self, method: str, round_index: int, arrays: Arrays) -> Arrays:
        """Return the key store's answer; raise the error that it raised, `RunFailed` if its actor is gone."""
        try:
            answer: Arrays = ray.get(self._service.call.remote(method, round_index, arrays))
        except RayTaskError as error:
            cause = error.cause
            raise (
                cause if isinstance(cause, PayloadError | UserError) else RunFailed(f"key service: {cause!r}")
            ) from error
        except RayActorError as error:
            raise RunFailed("the actor that holds the clients' keys is gone; resume the run") from error
        return answer
