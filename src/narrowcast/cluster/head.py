"""Whether the head of the cluster is still there: without it Ray ends this process within a minute, unsaid."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field

from narrowcast.platform.errors import RunFailed

LOOK_SECONDS = 2.0
_PATIENCE_SECONDS = 10.0  # a head that comes back sooner was never missed
_CONNECT_SECONDS = 3.0


@dataclass
class Head:
    """The head at host:port, and when it last answered."""

    address: str
    looked_at: float = field(default_factory=time.monotonic)
    answered_at: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Look now and then whether it answers; `RunFailed` once it has not for too long."""
        if time.monotonic() - self.looked_at >= LOOK_SECONDS:
            self.answers()

    def answers(self) -> bool:
        """Whether it answers at present; `RunFailed` once it has not for too long."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            self.looked_at = time.monotonic()
            if self.looked_at - self.answered_at > _PATIENCE_SECONDS:
                raise RunFailed(
                    f"the head of the cluster at {self.address} is gone ({error.strerror or error}); start it again, "
                    "then resume"
                ) from error
            return False
        self.looked_at = self.answered_at = time.monotonic()
        return True

    def wait(self) -> None:
        """Wait until it answers; `RunFailed` where it does not for too long."""
        while not self.answers():
            time.sleep(LOOK_SECONDS / 4)
