"""Runs that learn nothing, or not what was meant: errors that say what to change, log lines of rounds, and warnings."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from narrowcast.algorithms.codecs.low_rank import Factored
from narrowcast.experiment import Experiment
from narrowcast.platform.config.files import flatten
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import NoLearningError
from narrowcast.platform.rounds.evaluation import measure
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Buffered
from narrowcast.platform.rounds.state import Run, RunState, start
from narrowcast.platform.storage.journal import Journal, evaluation
from narrowcast.platform.tracking.units import format_seconds

MAX_ROUNDS_WITHOUT_UPDATES = 100
"""Rounds with clients from the start of a run after which it ends if no upload was used."""
_ROUNDS_EXPLAINED = 100
_ROUNDS_OF_DIVERGENCE = 10

_ADVICE = {
    "without training samples": (
        "the clients have no training samples; use fewer of them (data.clients), or another partition"
    ),
    "lost with their host": (
        "the hosts of the clients failed; see the messages above, and use backend.on_failure = redo"
    ),
}
"""By cause, where the experiment's settings do not matter."""

Ledger = Mapping[str, Sequence[Any]]
"""Columns of a round's `RoundLedger` by name."""


def check_learned(run: Run, experiment: Experiment, journal: Journal, state: RunState) -> None:
    """Raise `NoLearningError` for a finished run whose global model is not the result of its clients' updates."""
    rounds = journal.rounds
    if not any(row["delivered"] for row in rounds):
        raise nothing_used(experiment, journal.ledgers(), run)
    last: Mapping[str, Any] = next((row for row in reversed(rounds) if evaluation(row)), {})
    if wrong := [name for name, value in evaluation(last).items() if math.isnan(value)]:
        first = _not_finite_at_first(run)
        why = first or f"the training diverged; {_slower(experiment)}"
        raise NoLearningError(f"{wrong[0]} is nan in round {last['round']}: {why}")
    recent = [row for row in rounds if row["clients"]][-_ROUNDS_OF_DIVERGENCE:]
    if not any(row["delivered"] for row in recent):
        causes = _causes(experiment, journal.ledgers({row["round"] for row in recent}))
        if set(causes) == {"diverged"}:
            raise NoLearningError(
                f"the training diverged: no upload of the last {len(recent)} rounds was used; {_slower(experiment)}"
            )
    before, after = (run.algorithm.final(moment.server) for moment in (start(run), state))
    if run.traits.sends and all(np.array_equal(before[name], values) for name, values in after.items()):
        raise NoLearningError(
            "the uploads changed nothing: the global model is the one before round 1; raise training.learning_rate "
            f"(now {experiment.training.traits.rate_text}), or compress less (algorithm)"
        )


def nothing_used(experiment: Experiment, ledgers: Iterable[Ledger], run: Run | None = None) -> NoLearningError:
    """Return the error of a run of which no upload was used, from the clients' ledgers of its rounds.

    With `run`, a loss that is not finite before any training is told from training that diverges.
    """
    explained = list(islice((ledger for ledger in ledgers if len(ledger["client"])), _ROUNDS_EXPLAINED))
    causes = _causes(experiment, explained)
    if not causes:
        return NoLearningError(
            f"no client was available in any round with {_shown('availability', experiment)}, and drawn by "
            f"sampling = {experiment.sampling.kind}; change these, or run more rounds"
        )
    cause, _ = causes.most_common(1)[0]
    if cause == "diverged" and run is not None and (wrong := _not_finite_at_first(run)):
        return NoLearningError(f"no upload of any round was used: {wrong}")
    shares = "" if len(causes) == 1 else f" ({', '.join(f'{count} {name}' for name, count in causes.items())})"
    return NoLearningError(f"no upload of any round was used{shares}: {_explained(cause, experiment, explained)}")


def why_in_vain(experiment: Experiment, ledger: Ledger) -> str:
    """Return why no upload of a round was used, and what to change."""
    cause, _ = _causes(experiment, [ledger]).most_common(1)[0]
    return _explained(cause, experiment, [ledger])


def _causes(experiment: Experiment, ledgers: Iterable[Ledger]) -> Counter[str]:
    """Count the participations whose upload was not used by cause."""
    counts: Counter[str] = Counter()
    for ledger in ledgers:
        columns = (np.asarray(ledger[name]) for name in ("delivered", "late", "uplink_bits", "loss", "examples"))
        delivered, late, bits, loss, examples = columns
        for each_late, each_bits, each_loss, each_examples in zip(
            late[~delivered], bits[~delivered], loss[~delivered].astype(float), examples[~delivered], strict=True
        ):
            if not each_examples:
                counts["without training samples"] += 1
            elif each_late:
                counts["late" if experiment.deadline_seconds is not None or each_bits else "lost with their host"] += 1
            elif not each_bits:
                counts["without a payload that fits"] += 1
            else:
                protected = "in sums that were not opened" if experiment.secure.kind != "none" else "diverged"
                lossy = "lost on the link" if experiment.radio is not None else protected
                counts[lossy if math.isfinite(each_loss) else "diverged"] += 1
    return counts


def _explained(cause: str, experiment: Experiment, ledgers: Sequence[Ledger]) -> str:
    if cause in _ADVICE:
        return _ADVICE[cause]
    match cause:
        case "late":
            fastest = min((min(ledger["seconds"]) for ledger in ledgers if len(ledger["seconds"])), default=math.nan)
            overhead = experiment.clock.compute_overhead_seconds
            advice = f", {overhead:g} s of them clock.compute_overhead_seconds" if overhead else ""
            return (
                f"all were later than deadline_seconds = {experiment.deadline_seconds:g}, since the fastest client "
                f"needs {format_seconds(fastest)}{advice}; raise deadline_seconds or use fewer bits"
                if experiment.deadline_seconds is not None
                else "all were late; lower over_selection"
            )
        case "without a payload that fits":
            limits = {
                path: value
                for path, value in flatten(experiment.plain()).items()
                if path.endswith("upload_seconds") and value is not None
            }
            now = ", ".join(f"{path} = {value:g}" for path, value in limits.items())
            return (
                "no link carries the least payload of its client"
                + (f" within {now}; raise that" if now else "; use faster links (fleet, radio)")
                + ", or lower algorithm.rank or the codec's levels"
            )
        case "lost on the link":
            return f"outages of {_shown('radio.channel', experiment)} took them; use lower rates or another channel"
        case "in sums that were not opened":
            return (
                f"secure.kind = {experiment.secure.kind} opens no sum of so few clients; raise clients_per_round, or "
                "lower the least number of clients under secure"
            )
        case _:
            return f"the clients' training diverged; {_slower(experiment)}"


def _not_finite_at_first(run: Run) -> str:
    """Return which metric is not a number before any training, and what to look at; empty if none is."""
    for name, value in sorted(measure(run, start(run)).items()):
        if math.isnan(value):
            return f"{name} of the first model is nan before any training; look at the loss and at the data"
    return ""


def _slower(experiment: Experiment) -> str:
    return f"lower training.learning_rate (now {experiment.training.traits.rate_text})"


def _shown(section: str, experiment: Experiment) -> str:
    values = flatten(experiment.plain())
    of_section = {path: value for path, value in values.items() if path.startswith(f"{section}.")}
    return ", ".join(f"{path} = {value}" for path, value in of_section.items())


logger = logging.getLogger(__name__)


def watch_rounds(name: str, experiment: Experiment, run: Run, journal: Journal) -> Callable[[Outcome], None]:
    """Return the function to be called after each round, which logs its lines.

    It raises `NoLearningError` after `MAX_ROUNDS_WITHOUT_UPDATES` rounds without a delivered update.
    """
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
            if in_vain == MAX_ROUNDS_WITHOUT_UPDATES:
                raise nothing_used(experiment, journal.ledgers(), run)

    return watch


FEW_SAMPLES = 10
"""Samples of a client below which a share such as the accuracy moves in steps of more than 10 %."""


def ineffective_settings(experiment: Experiment, task: Task, state: RunState) -> Iterator[str]:
    """Yield a warning for each setting of a new run that has no effect, with what happens instead."""
    schedule, clients = experiment.schedule, task.data.n_clients
    if isinstance(schedule, Buffered):
        if schedule.buffer_size > clients:
            yield (
                f"schedule.buffer_size = {schedule.buffer_size}: the data have {clients} clients, so each step uses "
                f"{clients} updates"
            )
        elif schedule.concurrency < schedule.buffer_size:
            yield (
                f"schedule.concurrency = {schedule.concurrency} is below buffer_size = {schedule.buffer_size}: each "
                f"step waits for {-(-schedule.buffer_size // schedule.concurrency)} groups of clients in turn"
            )
    elif "clients_per_round" in experiment.model_fields_set and experiment.clients_per_round > clients:
        yield (
            f"clients_per_round = {experiment.clients_per_round}: the data have {clients} clients, so all of them take "
            "part in each round"
        )
    if idle := int((task.data.examples == 0).sum()):
        yield f"{idle} of {clients} clients have no training samples; use fewer clients, or another partition"
    for split in experiment.evaluate_clients:
        examples = task.data.examples_of(split)
        if left_out := int((examples == 0).sum()):
            yield f"{left_out} of {clients} clients have no {split} samples; metrics over clients leave them out"
        if isinstance(task.data, Samples) and (few := int(np.median(examples[examples > 0]))) < FEW_SAMPLES:
            yield f"evaluate_clients: half of the clients have {few} {split} samples or fewer; their metrics are coarse"
    if experiment.secure.kind not in ("none", "plain") and not experiment.private_seed.own:
        yield (
            f"secure.kind = {experiment.secure.kind}: the clients' secrecy is simulated, since their private draws "
            "follow from seed; set client_seed to a number of their own if somebody who knows seed must not follow them"
        )
    shapes = {name: values.shape for name, values in state.server.items()}
    for index, stage in enumerate(experiment.algorithm.traits.codec):
        if isinstance(stage, Factored) and not stage.factored(shapes):
            yield (
                f"algorithm.codec.{index}: no matrix of the model is smaller as two factors of rank {stage.rank}, so "
                "all are sent whole; lower rank"
            )
