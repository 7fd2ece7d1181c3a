"""Health check of the cluster's head; if the head is gone, Ray ends this process within a minute without a message."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field

from narrowcast.platform.errors import RunFailed

CHECK_SECONDS = 2.0
_TIMEOUT_SECONDS = 10.0  # a head that restarts within this time is not missed
_CONNECT_SECONDS = 3.0


@dataclass
class Head:
    """The head at host:port, with the times of the last check and the last answer."""

    address: str
    checked_at: float = field(default_factory=time.monotonic)
    answered_at: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Check the head if the last check is old enough; raise `RunFailed` after the timeout without an answer."""
        if time.monotonic() - self.checked_at >= CHECK_SECONDS:
            self.answers()

    def answers(self) -> bool:
        """Return whether the head answers now; raise `RunFailed` after the timeout without an answer."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            self.checked_at = time.monotonic()
            if self.checked_at - self.answered_at > _TIMEOUT_SECONDS:
                raise RunFailed(
                    f"the head of the cluster at {self.address} is gone ({error.strerror or error}); start it again, "
                    "then resume"
                ) from error
            return False
        self.checked_at = self.answered_at = time.monotonic()
        return True

    def wait(self) -> None:
        """Wait until the head answers; raise `RunFailed` after the timeout without an answer."""
        while not self.answers():
            time.sleep(CHECK_SECONDS / 4)
