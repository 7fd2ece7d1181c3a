"""The dashboard of a Ray cluster, to which jobs are submitted: reachability, version, token and nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version as installed

import requests
from packaging.version import Version

from narrowcast.cluster.ray_internals import NODES_PATH
from narrowcast.cluster.ray_token import check_token, token
from narrowcast.platform.errors import UserError, shown

_SECONDS = 10.0
_TOKEN_ADVICE = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or put the cluster's token into ~/.ray/auth_token"


@dataclass(frozen=True)
class ClusterNode:
    """A node that is alive, with its resources by name, custom ones included."""

    ip: str
    head: bool
    resources: Mapping[str, float]

    def holds(self, needed: Mapping[str, float]) -> int:
        """Return how many actors with these needs, each above zero, fit on the node when it is idle."""
        return min(math.floor(self.resources.get(name, 0.0) / amount + 1e-9) for name, amount in needed.items())


@dataclass(frozen=True)
class Dashboard:
    """A cluster that answered, with a Ray version compatible with ours."""

    address: str
    ray_version: str

    def nodes(self) -> list[ClusterNode]:
        """Return the nodes that are alive."""
        answer = _get(self.address, NODES_PATH)
        try:
            return [
                ClusterNode(row["node_ip"], bool(row["is_head_node"]), _amounts(row["resources_total"]))
                for row in answer.json()["data"]["result"]["result"]
                if row["state"] == "ALIVE"
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"the dashboard at {self.address} lists no nodes; look at the head's logs") from error

    def check_fits(self, actors: int, needed: Mapping[str, float]) -> None:
        """Raise `UserError` if so many actors with these needs can never run, even on an idle cluster."""
        needed = {name: amount for name, amount in needed.items() if amount}
        nodes = self.nodes()
        if needed and (capacity := sum(node.holds(needed) for node in nodes)) < actors:
            need = ", ".join(f"{amount:g} {name}" for name, amount in needed.items())
            offers = "; ".join(f"{node.ip} {_shown(node.resources, needed)}" for node in nodes[:4])
            more = f" and {len(nodes) - 4} more" if len(nodes) > 4 else ""
            raise UserError(
                f"backend.actors = {actors} with {need} each: the cluster at {self.address} has room for {capacity} "
                f"({offers}{more}); lower backend.actors or what each needs, or add nodes"
            )


def _amounts(resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources of a node; raise `ValueError` or `TypeError` for an amount that is not a finite number."""
    if not all(map(math.isfinite, resources.values())):
        raise ValueError("an amount is not finite")
    return dict(resources)


def reach(address: str) -> Dashboard:
    """Return the cluster at http://host:port.

    Raise `UserError` within seconds if there is no usable one, or if others may read the token.
    """
    check_token()
    address = normalise(address)
    answer = _get(address, "/api/version")
    try:
        version = str(answer.json()["ray_version"])
        parsed, installed_version = Version(version), Version(installed("ray"))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{address} answers, but is not a Ray dashboard; give that of the head, http://HEAD:8265"
        ) from error
    if parsed.release[:2] != installed_version.release[:2]:
        raise UserError(
            f"the cluster at {address} runs Ray {version}, this machine Ray {installed_version}; "
            f"pip install ray=={version} here, or start the cluster with {installed_version}"
        )
    return Dashboard(address, version)


def normalise(address: object) -> str:
    """Return the address with a scheme and without a path; raise `UserError` if it is malformed."""
    if not isinstance(address, str):
        raise UserError(f"address is {shown(address)}; give the dashboard of the cluster's head, as http://HEAD:8265")
    scheme, separator, rest = address.rstrip("/").rpartition("://")
    host, _, port = rest.partition("/")[0].rpartition(":")
    if (separator and scheme not in ("http", "https")) or not host or "@" in address or not port.isdigit():
        raise UserError(
            f'--address "{address.rpartition("@")[2]}" is not the address of a dashboard; give http://HEAD:8265'
        )
    return f"{scheme or 'http'}://{host}:{port}"


def is_open(address: str) -> bool:
    """Return whether the cluster accepts requests without a token."""
    try:
        return requests.get(f"{normalise(address)}/api/version", timeout=_SECONDS).ok
    except requests.RequestException:
        return False


def headers() -> dict[str, str]:
    """Return the HTTP headers of a request to a dashboard."""
    shown = token()
    return {"Authorization": f"Bearer {shown}"} if shown else {}


def _get(address: str, path: str) -> requests.Response:
    try:
        answer = requests.get(address + path, headers=headers(), timeout=_SECONDS)
    except requests.RequestException as error:
        reason = "no answer in time" if isinstance(error, requests.Timeout) else "nothing listens there"
        raise UserError(
            f"no Ray cluster answers at {address} ({reason}); start one, or give the address of its dashboard, "
            "for which the head needs ray[default]"
        ) from error
    if answer.status_code in (401, 403):
        problem = "wants a token" if token() is None else "does not accept this token"
        raise UserError(f"the cluster at {address} {problem}; {_TOKEN_ADVICE}")
    if not answer.ok:
        raise UserError(
            f"{address} answers, but is not a Ray dashboard (status {answer.status_code}); give that of the head, "
            "http://HEAD:8265"
        )
    return answer


def _shown(resources: Mapping[str, float], names: Iterable[str]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names)
