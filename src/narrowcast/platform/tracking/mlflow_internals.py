"""Parts of MLflow outside its documented interface: the load of this machine, the tables and the schemes of stores.

The documented monitor, `mlflow.enable_system_metrics_logging`, works on the one active run of a process, and ends for
good at the first call that the store does not answer. `CHECKED_VERSION` is the latest version that this was checked
against; a test fails where a later one is installed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from sqlalchemy import Engine

CHECKED_VERSION = "3.17.2"
logger = logging.getLogger(__name__)


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
            self._monitor.mlflow_logger.flush()
        except Exception as error:  # the load is not worth a failed run
            logger.debug("the load of this machine was not logged: %s", type(error).__name__)
