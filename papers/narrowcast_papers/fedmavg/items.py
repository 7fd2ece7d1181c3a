"""FedMAvg on MovieLens latest-small: the error of held-out ratings against the uplink, by the number of senders.

Reference: Wang, Suwandi and Chang, ICASSP 2021, application to item recommendation: 610 users, of which m = 610, 100,
50 and 10 send W in a round. The poster has curves and no numbers, and does not say how missing ratings count: here the
squared error is that of observed ratings.

A fifth of the ratings is for testing. The weight decay of every cell is the best of four on a tenth of the ratings,
with a seed that is not a test seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowcast.studies.spec import RunSpec
from narrowcast.studies.tuning import TunedCell

STUDY = "fedmavg-items"
TEST_SEEDS = 5
DECAYS = (0.3, 1.0, 2.0, 4.0)
USERS, ROUNDS = 610, 50
_QUANTISED = "[{kind: quantise, levels: 127, scale: max}, entropy]"
_UNEQUAL = (
    "fleet={kind: lognormal, uplink_mbit_per_second: {median: 1, sigma: 1}, compute_speed: {median: 1, sigma: 0}}"
)
SENDERS, UPLOADS, LINKS, STEPS = "senders", "uploads", "links", "steps"
"""The parts of the study: senders of whole matrices, other uploads, unequal links, several columns a client."""


@dataclass(frozen=True)
class ItemCell(TunedCell[float]):
    """One setting: its part of the study, its name, and its overrides; some settings have other numbers of rounds."""

    part: str
    name: str
    algorithm: str = ""
    others: tuple[str, ...] = ()
    rounds: int = ROUNDS
    steps: int = 0
    clients: int = USERS

    @property
    def grid(self) -> Sequence[float]:
        """The values that are tried."""
        return DECAYS

    def best(self, results: Sequence[Mapping[str, Any]]) -> float:
        """Return the best weight decay, from the results in the order of `DECAYS`."""
        reached = [result["final"].get("validation.rmse", float("inf")) for result in results]
        return DECAYS[reached.index(min(reached))]

    def spec(self, value: float, part: str) -> RunSpec:
        """Return the run at a weight decay."""
        data = f"kind: explicit_ratings, set: ml-latest-small, validation_share: 0.1, clients: {self.clients}"
        return RunSpec(
            f"{STUDY}-{re.sub(r'[ =,]+', '-', self.name)}-{value:g}{part}",
            "fedavg-digits",
            (
                f"data={{{data}}}",
                "model={kind: masked_factorisation, rank: 10}",
                f"algorithm={{kind: fedmavg{self.algorithm}}}",
                f"training={{kind: alternating_gradient, weight_decay: {value:g}, w_steps: {self.steps}}}",
                f"clients_per_round={USERS}",
                "sampling=uniform",
                "chunk_size=64",
                f"rounds={self.rounds}",
                f"evaluate_every={self.rounds}",
                "clock.compute_overhead_seconds=0",
                "checkpoint_seconds=100000",
                *self.others,
            ),
            data_seed=True,
            memory_gib=0.3,
        )


def _senders(count: int) -> str:
    return "" if count == USERS else f", senders: {count}"


CELLS: tuple[ItemCell, ...] = (
    *(ItemCell(SENDERS, f"m = {count}", _senders(count)) for count in (610, 100, 50, 10)),
    *(ItemCell(UPLOADS, f"m = {count}, rated rows", f"{_senders(count)}, rows: touched") for count in (610, 10)),
    *(
        ItemCell(
            UPLOADS, f"m = {count}, rated rows, quantised", f"{_senders(count)}, rows: touched, codec: {_QUANTISED}"
        )
        for count in (610, 10)
    ),
    ItemCell(UPLOADS, "m = 10, quantised", f", senders: 10, codec: {_QUANTISED}"),
    *(ItemCell(LINKS, f"m = {count}, unequal links", _senders(count), (_UNEQUAL,)) for count in (610, 10)),
    *(
        ItemCell(
            LINKS,
            f"m = {count}, unequal links, 10 s",
            _senders(count),
            (_UNEQUAL, "deadline_seconds=10"),
        )
        for count in (610, 10)
    ),
    *(
        ItemCell(STEPS, f"{name}, Q = {steps}, {rounds} rounds", rounds=rounds, steps=steps, clients=clients)
        for name, clients in (("1 user a client", USERS), ("30 users a client", 20))
        for rounds in (5, ROUNDS)
        for steps in (0, 20)
        if (clients, rounds, steps) != (USERS, ROUNDS, 0)
    ),
)


def cell(name: str) -> ItemCell:
    """Return the cell of this name."""
    return next(cell for cell in CELLS if cell.name == name)
