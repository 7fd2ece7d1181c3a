"""Fields that every kind of run has: its checkpoints, its tracking store, and the identity of its results.

MLflow sends the credentials of the environment to whatever address it is given. Here they go to the host that the
environment names, and to another one only by the user's word. Importing this module does not import MLflow.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlparse, urlsplit

from pydantic import AfterValidator, Field

from narrowcast.platform.config.fields import Role, role_of
from narrowcast.platform.config.files import Section, flatten, plain_values
from narrowcast.platform.config.redaction import hide_secrets
from narrowcast.platform.config.yaml import write_yaml
from narrowcast.platform.errors import warn_once
from narrowcast.platform.storage.disk import expand_home

_KEPT = Role(identity=False, not_tuned="it does not affect a run")


def _lasting(value: str | None) -> str | None:
    return value and str(expand_home(value).absolute())


LastingPath = Annotated[str | None, AfterValidator(_lasting)]
"""A path that processes with another working directory or home folder read as the same place."""


def _lasting_place_without_password(value: str | None) -> str | None:
    if value is None or "://" not in value:
        return _lasting(value)
    if hide_secrets(value) != value:
        raise ValueError("names a user or password, which would be written down; give them in the environment")
    return value.rstrip("/")


CheckpointEvery = Annotated[
    int | None, _KEPT, Field(ge=1, description="interval of checkpoints, besides checkpoint_seconds")
]
CheckpointSeconds = Annotated[
    float, _KEPT, Field(ge=0, description="wall time between checkpoints; the end of the run has one")
]
CheckpointsKept = Annotated[int, _KEPT, Field(ge=1, description="number of checkpoints kept, the latest ones")]
CheckpointPath = Annotated[
    str | None,
    _KEPT,
    AfterValidator(_lasting_place_without_password),
    Field(description="folder of the checkpoints, or fsspec URL; null: in the run's folder"),
]


logger = logging.getLogger(__name__)
PLACE = "narrowcast.place"
"""The tag of a run that says where its folder is, as a digest of host and path."""
_CREDENTIALS = ("USERNAME", "TOKEN", "AWS_SIGV4", "AUTH", "CLIENT_CERT_PATH")
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class StoreAddress:
    """The address of a store, and whose word it is: of the user, of a file that is run, of a folder that is looked at.

    The user's store gets the credentials of the environment. That of a folder keeps the files of runs itself, since it
    could name any other place for them, on this machine too.
    """

    uri: str = field(repr=False)  # its password
    named_by: Literal["user", "file", "folder"] = "file"

    @property
    def shown(self) -> str:
        """The address without secrets."""
        return hide_secrets(self.uri)

    def gets_credentials(self, url: str) -> bool:
        """Return whether a request to the URL, which the store may have named, gets those of the environment."""
        of_user = self.named_by == "user" or _is_environments(self.uri)
        return of_user and host_of(self.uri) in {host_of(url)} - {None}

    def may_keep_files_at(self, address: str) -> bool:
        """Return whether the files of a run may go to a place that the store has named."""
        if self.named_by != "folder":
            return True
        if (path := local_path(address)) is not None:
            own_path = local_path(self.uri)
            return own_path is not None and path.is_relative_to(
                own_path.parent if self.uri.startswith("sqlite:") else own_path
            )
        parts = urlsplit(address)
        through_store = parts.scheme == "mlflow-artifacts" and parts.netloc in ("", urlsplit(self.uri).netloc)
        return through_store or host_of(self.uri) in {host_of(address)} - {None}

    def say_what_is_withheld(self, remedy: str) -> None:
        """Log once that the credentials of the environment are not sent, if there are any, and how to send them."""
        if self.named_by != "user" and host_of(self.uri) is not None and _has_credentials():
            warn_once(
                logger,
                f"MLflow's credentials of the environment are not sent to {self.shown}, since MLFLOW_TRACKING_URI "
                f"names {'another host' if host_of(_environments()) else 'no host'}; to send them, {remedy}",
            )


class Tracking(Section):
    """The tracking store: `uri`, else MLFLOW_TRACKING_URI, else an SQLite file in the output folder."""

    uri: str | None = Field(
        None, description="MLflow tracking URI; null: MLFLOW_TRACKING_URI, else mlflow.db in the output folder"
    )
    credentials: Literal["environment"] | None = Field(
        None,
        description="environment: MLflow's credentials of the environment are sent to the host of `uri`; null: only "
        "to that of MLFLOW_TRACKING_URI",
    )
    experiment: str = Field("narrowcast", min_length=1, description="name of the MLflow experiment")
    system_metrics: bool = Field(True, description="record the use of CPU, memory, disk and network")
    flush_seconds: float = Field(
        30.0, ge=0, description="longest wait, after the last round, for a store that lags or is down"
    )

    def resolve(self, output: Path) -> StoreAddress:
        """Return the address in force."""
        if self.uri:
            of_user = self.credentials is not None or _is_environments(self.uri)
            return StoreAddress(self.uri, "user" if of_user else "file")
        if of_environment := _environments():
            return StoreAddress(of_environment, "user")
        return StoreAddress(f"sqlite:///{output.resolve()}/mlflow.db")

    def without_secrets(self) -> Tracking:
        """Return a copy without the password in the URI."""
        return self.model_copy(update={"uri": hide_secrets(self.uri) if self.uri else None})


def host_of(url: str) -> tuple[str, str, int] | None:
    """Return scheme, host and port of an http address, as the library reads them that connects; None of any other."""
    if not url.lower().startswith(("http:", "https:")):
        return None
    from urllib3.exceptions import LocationParseError
    from urllib3.util import parse_url

    try:
        parts = parse_url(url)
    except LocationParseError:
        return None
    if not parts.host or parts.scheme not in _PORTS:
        return None
    return parts.scheme, parts.host, parts.port or _PORTS[parts.scheme]


def local_path(address: str) -> Path | None:
    """Return the path of files or of an SQLite database on this machine, links resolved; None of any other address.

    An address of SQLite with options, which may lead elsewhere, is another one.
    """
    scheme, colon, database_path = address.partition(":")
    if scheme == "sqlite":
        database = database_path.removeprefix("///")
        return None if "?" in database else Path(database).resolve()
    if colon and scheme != "file":
        return None
    return Path(unquote(urlparse(address).path if colon else address)).resolve()  # as MLflow reads them


def _environments() -> str:
    return os.environ.get("MLFLOW_TRACKING_URI", "")


def _is_environments(uri: str) -> bool:
    host = host_of(uri)
    return uri == _environments() or (host is not None and host == host_of(_environments()))


def _has_credentials() -> bool:
    # expanduser, unlike Path.home, does not raise for a user without a home folder
    file = Path(os.path.expanduser("~/.mlflow/credentials"))  # noqa: PTH111
    return file.is_file() or any(os.environ.get(f"MLFLOW_TRACKING_{name}") for name in _CREDENTIALS)


class Identified(Section):
    """A frozen model of a whole run, which reads from and writes to YAML; `Role` says which fields are its identity."""

    def plain(self) -> dict[str, Any]:
        """Nested plain values, as the YAML file has them, without secrets."""
        values = plain_values(self)
        for name, value in self:
            if isinstance(value, Tracking):
                values[name] = plain_values(value.without_secrets())
        return values

    def save(self, path: str | Path) -> Path:
        """Write all values, without passwords, to a YAML file that gives the same results."""
        path = Path(path)
        write_yaml(self.plain(), path)
        return path

    def identity(self) -> dict[str, Any]:
        """Return the dotted values that the results of a round or iteration depend on."""
        return self.identity_of(self.plain())

    @classmethod
    def identity_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the nested values that are part of the identity, by dotted path."""
        return flatten({key: value for key, value in values.items() if role_of(cls, key).identity})

    def digest(self) -> str:
        """Return the sha256 of `identity`."""
        return digest_of(self.identity())


def digest_of(identity: Mapping[str, Any]) -> str:
    """Return the sha256 of an identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
