"""Parts of MLflow outside its documented interface: credentials, places of files, system metrics, tables, schemes.

The documented monitor, `mlflow.enable_system_metrics_logging`, works on the one active run of a process, and ends for
good at the first call that the store does not answer. `CHECKED_VERSION` is the latest version that this was checked
against; a test fails where a later one is installed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking._tracking_service import client as tracking_client
from mlflow.utils import credentials as mlflow_credentials
from mlflow.utils.rest_utils import MlflowHostCreds
from sqlalchemy import Engine

from narrowcast.platform.errors import UserError
from narrowcast.platform.redaction import hide_secrets
from narrowcast.platform.tracking.store_address import StoreAddress

CHECKED_VERSION = "3.17.2"
logger = logging.getLogger(__name__)
_WITHHELD = ("username", "password", "token", "aws_sigv4", "auth", "client_cert_path")
_called: ContextVar[StoreAddress | None] = ContextVar("called", default=None)


@contextmanager
def limits_of(store: StoreAddress) -> Iterator[None]:
    """Let MLflow send credentials and files, in the block, only where the store's address allows it."""
    token = _called.set(store)
    try:
        yield
    finally:
        _called.reset(token)


def _host_credentials(host: str, **given: Any) -> MlflowHostCreds:
    """Return what MLflow connects to a host with; it asks for that before every request, artifacts included."""
    store = _called.get()
    if store is not None and not store.gets_credentials(host):
        given = {key: each for key, each in given.items() if key not in _WITHHELD}
    return MlflowHostCreds(host, **given)


def _place_of_files(artifact_uri: str, tracking_uri: str | None = None) -> ArtifactRepository:
    """Return where MLflow puts the files of a run; raise `UserError` if its store may not name that place."""
    store = _called.get()
    if store is not None and not store.may_keep_files_at(artifact_uri):
        raise UserError(
            f"the store at {store.shown} would keep the files of the run at {hide_secrets(artifact_uri)}; if you trust "
            f"it, give --tracking-uri {store.shown}"
        )
    return get_artifact_repository(artifact_uri, tracking_uri)


# `setattr`, since for types these names are fixed.
setattr(mlflow_credentials, "MlflowHostCreds", _host_credentials)  # noqa: B010
setattr(tracking_client, "get_artifact_repository", _place_of_files)  # noqa: B010


def import_sql_store() -> None:
    """Import the store of databases, which MLflow does when it first opens one."""
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401


def create_tables(engine: Engine) -> None:
    """Create the tables of a tracking store in an empty database."""
    from mlflow.store.db.utils import _initialize_tables  # takes a while, and a store that is there has them

    _initialize_tables(engine)


def has_store(scheme: str) -> bool:
    """Return whether MLflow, or a plugin of it, has tracking stores of this scheme."""
    from mlflow.tracking._tracking_service import utils  # imports every store

    return scheme in utils._tracking_store_registry._registry


class SystemMonitor:
    """A thread that logs the load of this machine to an MLflow run until `finish`, through outages of the store.

    A resumed run continues at the step after its last sample.
    """

    def __init__(
        self, uri: str, run_id: str, settings: Callable[[], AbstractContextManager[None]], *, resume: bool
    ) -> None:
        """Begin to sample; each call to the store is made within `settings`."""
        self._settings = settings
        self._monitor: Any = SystemMetricsMonitor(run_id, resume_logging=resume, tracking_uri=uri)
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="system-monitor", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while True:
            for _ in range(self._monitor.samples_before_logging):
                self._monitor.collect_metrics()
                if self._finished.wait(self._monitor.sampling_interval):
                    return
            try:
                with self._settings():
                    self._monitor.publish_metrics(self._monitor.aggregate_metrics())
            except Exception as error:  # MLflow keeps the samples and sends them with the next
                logger.debug("the load of this machine was not logged: %s", type(error).__name__)

    def finish(self) -> None:
        """Stop sampling, and send what is left if the store answers."""
        self._finished.set()
        self._thread.join()
        try:
            with self._settings():
                self._monitor.mlflow_logger.flush()
        except Exception as error:  # the load is not worth a failed run
            logger.debug("the load of this machine was not logged: %s", type(error).__name__)
