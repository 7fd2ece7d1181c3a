"""Attackers among the clients: the contract of an attack, and the clients that carry it out in a run.

An attack is a field of the experiment, and no algorithm knows of it. Attackers do all that clients do: they train, are
billed for what they send, and lose uploads. An attack changes the samples on which they train (`poison`), the terms of
their local steps (`terms`) or the changes that they claim to have learnt (`tamper`), before these are encoded. One that
is elected as the server of a round may count only what attackers sent (`serving`).
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from narrowcast.platform.config.files import Section
from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.data.samples import Labelled
from narrowcast.platform.errors import UserError
from narrowcast.platform.seeds import PrivateSeed, generator
from narrowcast.platform.types import BoolArray, Chunk, FloatArray, IntArray, LocalTerms

View = Literal["own", "group", "all"]
"""The changes that an attacker knows besides its own: none, those of the attackers of the cohort, or of all clients."""


@dataclass(frozen=True)
class Seen:
    """The knowledge of the attackers of a cohort when they choose their claims.

    Shapes: weights [A], those of the attackers in a weighted mean; others [H, d], the true changes of the other clients
    of the cohort, before they are encoded, and their weights other_weights [H]; H is 0 unless the attack sees `all`.
    `draw` is a generator of these attackers in this round. Attackers that see their `own` are asked one by one.
    """

    weights: FloatArray
    others: FloatArray
    other_weights: FloatArray
    draw: np.random.Generator

    def honest(self, own: FloatArray) -> FloatArray:
        """Return the changes of honest training that the attackers know: those of others, or their own without any."""
        return self.others if len(self.others) else own


class Attack(Section, ABC):
    """Contract of an attack: a frozen model whose fields are its settings.

    A subclass has a `kind` and overrides one of `poison`, `terms` and `tamper`; each stands here with what it returns
    for an attack that does nothing of the sort. Results must depend on the arguments alone.
    """

    attackers: (
        Annotated[int, Field(ge=1)]
        | Annotated[float, Field(gt=0, lt=1)]
        | Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    ) = Field(0.2, description="number or share of the clients that attack, drawn by the seed, or their indices")
    first_round: int = Field(1, ge=1, description="first round in which they attack; they are honest before")
    every: int = Field(1, ge=1, description="attack in every so many rounds from the first on; honest in between")
    serving: Literal["honest", "alone"] = Field(
        "honest",
        description="of an attacker elected as server: as asked, or counting attackers alone",
    )

    @property
    def sees(self) -> View:
        """The changes that attackers know: by default, each its own alone."""
        return "own"

    def attacks_in(self, round_index: int) -> bool:
        """Return whether attackers attack in this round."""
        return round_index >= self.first_round and (round_index - self.first_round) % self.every == 0

    def poison(self, data: Any, attackers: IntArray, seed: PrivateSeed) -> Any:
        """Return the data set on which attackers train, with as many samples each or more; `data` itself if not.

        Samples of other clients stay as they are, and weights follow the numbers of `data`. Raise `UserError` if the
        data set has nothing to poison.
        """
        del attackers, seed
        return data

    def terms(self, terms: LocalTerms, attacks: BoolArray, epochs: int) -> LocalTerms:
        """Return the terms of the local steps of a call's clients, of whom those that attack are marked, [C].

        `epochs` are those of the training, which the terms may replace.
        """
        del attacks, epochs
        return terms

    def tamper(self, own: FloatArray, seen: Seen) -> FloatArray:
        """Return the changes that attackers claim, [A, d], from their true ones; both are float64 and not written to.

        The tensors of a change are one vector of d numbers, in the order of their names.
        """
        del seen
        return own

    def measured(self, data: Any) -> Labelled | None:
        """Return test samples with the labels that attackers want for them; None if they want none.

        Their accuracy under the global model is `attack.success`.
        """
        del data
        return None

    @property
    def tampers(self) -> bool:
        """Return whether attackers claim other changes than they have learnt."""
        return type(self).tamper is not Attack.tamper


@dataclass(frozen=True, eq=False)
class Adversary:
    """An attack in a run: who attacks, on which data they train, and whose draws they make.

    `measured` has the test samples of `Attack.measured`; None without.

    Shapes: clients [U], whether each attacks.
    """

    attack: Attack
    clients: BoolArray
    data: Dataset = field(repr=False)
    seed: PrivateSeed
    measured: Dataset | None = field(default=None, repr=False)

    def attacking(self, round_index: int, clients: IntArray) -> BoolArray:
        """Return whether each of these clients attacks in this round, [C]."""
        return self.clients[clients] & self.attack.attacks_in(round_index)

    def apart(self, round_index: int, cohort: IntArray) -> BoolArray | None:
        """Return the clients of a cohort that are to train as one chunk, [C]; None if chunks do not matter."""
        together = self.attack.sees != "own" or self.attack.serving == "alone"
        if not together or not (attacking := self.attacking(round_index, cohort)).any():
            return None
        return attacking

    def serves_alone(self, round_index: int, server: int | None) -> bool:
        """Return whether the client that is the server of a round, if any is, counts attackers' uploads alone."""
        return (
            self.attack.serving == "alone"
            and server is not None
            and bool(self.attacking(round_index, np.array([server]))[0])
        )

    def draw(self, chunk: Chunk, first: int) -> np.random.Generator:
        """Return the generator of the attackers of a chunk, the first of whom has this place in it."""
        (key,) = self.seed.stream_keys("attack", chunk.round_index, chunk.clients[[first]])
        return np.random.Generator(np.random.Philox(key=int(key)))


def recruited(attack: Attack, data: Any, honest: BoolArray | None, seed: int, private_seed: PrivateSeed) -> Adversary:
    """Return the adversary of a run; `honest` [U] are clients that cannot attack, None if all can.

    Raise `UserError` if there are not so many clients, or nobody is left to be attacked.
    """
    n_clients, asked = data.n_clients, attack.attackers
    able = np.arange(n_clients) if honest is None else np.flatnonzero(~honest)
    where = f"attack.attackers = {asked!r}" if isinstance(asked, tuple) else f"attack.attackers = {asked:g}"
    if isinstance(asked, tuple):
        if len(set(asked)) < len(asked) or not np.isin(asked, able).all():
            raise UserError(f"{where}: give different clients of those that take part, 0 to {n_clients - 1}")
        chosen = np.array(asked)
    else:
        number = round(asked * len(able)) if asked < 1 else int(asked)
        if not 0 < number <= len(able):
            raise UserError(
                f"{where} of the {len(able)} clients that take part are {number}; give a share or number from 1 to "
                f"{len(able)}"
            )
        chosen = generator(seed, "attackers").choice(able, number, replace=False)
    clients = np.zeros(n_clients, dtype=bool)
    clients[chosen] = True
    poisoned, wanted = attack.poison(data, np.flatnonzero(clients), private_seed), attack.measured(data)
    return Adversary(attack, clients, poisoned, private_seed, None if wanted is None else replace(data, test=wanted))
