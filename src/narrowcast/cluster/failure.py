"""What is decided when a part of the cluster fails; acting on it is left to whoever asked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from narrowcast.platform.errors import RunFailed


@dataclass(frozen=True)
class FailureBudget:
    """How many failures a run puts up with: each is redone elsewhere, so it costs time and never results."""

    failures_left: int
    round_timeout_seconds: float

    def spend(self, problem: str) -> FailureBudget:
        """The budget after one more failure, or `RunFailed` where there was none left."""
        if self.failures_left == 0:
            raise RunFailed(
                f"the cluster failed once too often, last: {problem}; look at its logs, then resume, "
                "or raise executor.max_failures"
            )
        return replace(self, failures_left=self.failures_left - 1)
