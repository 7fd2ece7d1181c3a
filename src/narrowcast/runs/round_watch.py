"""Log lines about the rounds of a run, and the end of a run of which no upload is used."""

from __future__ import annotations

import logging
from collections.abc import Callable

from narrowcast.experiment import Experiment
from narrowcast.platform.outcome import Outcome
from narrowcast.platform.run import Run
from narrowcast.platform.tracking.journal import Journal
from narrowcast.runs.learning_check import MOST_ROUNDS_IN_VAIN, nothing_used, why_in_vain

logger = logging.getLogger(__name__)


def watch_rounds(name: str, experiment: Experiment, run: Run, journal: Journal) -> Callable[[Outcome], None]:
    """Return the function to be called after each round; it raises `LearnedNothing` after too many in vain."""
    in_vain: int | None = None if any(row["delivered"] for row in journal.rounds) else 0
    warned = False

    def watch(outcome: Outcome) -> None:
        nonlocal in_vain, warned
        record = outcome.record
        about = {"run": name, "round": record.round, "clients": outcome.ledger.client.tolist()}
        if record.clients and not record.delivered and not warned:
            warned = True
            cause = why_in_vain(experiment, vars(outcome.ledger))
            logger.warning("round %d: no upload was used: %s", record.round, cause, extra=about)
        if logger.isEnabledFor(logging.INFO):
            delivered = outcome.ledger.client[outcome.ledger.delivered].tolist()
            measured = {"uplink_bits": record.uplink_bits, "seconds": vars(outcome.timing), "metrics": outcome.metrics}
            logger.info("round %d", record.round, extra={**about, "delivered": delivered, **measured})
        if in_vain is not None:  # no upload of the run was used so far
            in_vain = None if record.delivered else in_vain + bool(record.clients)
            if in_vain == MOST_ROUNDS_IN_VAIN:
                raise nothing_used(experiment, journal.ledgers(), run)

    return watch
