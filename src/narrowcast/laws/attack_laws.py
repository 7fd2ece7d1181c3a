"""Laws of attacks: on the changes of small cohorts, on a small data set, and in a round of FedAvg."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np

from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.laws.law import require
from narrowcast.laws.small_tasks import N_CLIENTS, digest, samples, task_on
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.dataset import Dataset
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.rounds.adversary import Attack, Seen, recruited
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import Chunk, FloatArray

_ATTACKERS = (2, 5, 8)


def _claims(attack: Attack, *, reverse: bool = False) -> tuple[FloatArray, FloatArray]:
    """Return the claims of three attackers, or of one that knows its own change alone, and their true changes."""
    draw = np.random.default_rng(4)
    own, others = draw.normal(size=(3, 12)), draw.normal(size=(6, 12)) + 1
    weights, other_weights = draw.integers(1, 9, 3).astype(float), draw.integers(1, 9, 6).astype(float)
    if attack.sees == "own":
        own, weights = own[:1], weights[:1]
    if attack.sees != "all":
        others, other_weights = others[:0], other_weights[:0]
    if reverse:
        others, other_weights = others[::-1], other_weights[::-1]
    for values in (own, others, weights, other_weights):
        values.flags.writeable = False
    return attack.tamper(own, Seen(weights, others, other_weights, np.random.default_rng(3))), own


def claims_are_one_change_for_each_attacker(attack: Attack) -> None:
    """Tamper with changes of 12 numbers, which are not to be written to."""
    claims, own = _claims(attack)
    shape = np.shape(claims)
    require(shape == own.shape, f"the claims of {len(own)} attackers of 12 numbers are {shape}")
    require(np.isfinite(claims).all(), "claims are not finite")


def claims_depend_on_their_arguments_alone(attack: Attack) -> None:
    """Tamper twice, the second time through pickle."""
    again: Any = pickle.loads(pickle.dumps(attack))
    require(np.array_equal(_claims(attack)[0], _claims(again)[0]), "the same changes have other claims")


def the_order_of_honest_clients_does_not_matter(attack: Attack) -> None:
    """Tamper with the changes of the other clients in the opposite order."""
    claims, opposite = _claims(attack)[0], _claims(attack, reverse=True)[0]
    require(np.allclose(claims, opposite, atol=1e-9), "honest clients in another order have other claims")


def _task(attack: Attack | None) -> Task:
    """Return a task of eleven clients with images of 32 x 32 pixels, with these attackers or with honest clients."""
    data: Any = samples(np.arange(1, N_CLIENTS + 1))
    parts = {part: getattr(data, part) for part in ("train", "validation", "test")}
    data = replace(
        data,
        public=None,
        server=None,
        unlabelled=None,
        **{part: replace(of, features=of.features.repeat(4, -1).repeat(4, -2)) for part, of in parts.items()},
    )
    task = task_on(data, MLP(hidden=(6,)))
    if attack is None:
        return task
    attack = attack.model_copy(update={"attackers": _ATTACKERS})
    return replace(task, adversary=recruited(attack, data, None, 0, PrivateSeed.derived(0)))


def samples_of_honest_clients_stay(attack: Attack) -> None:
    """Poison three of eleven clients' samples, and look at those of the others."""
    task = _task(attack)
    assert task.adversary is not None
    before: Any = task.data
    after: Any = task.adversary.data
    require(isinstance(after, Dataset), f"poison returned {type(after).__name__}, not a data set")
    require(before.digest == _task(None).data.digest, "poison changed the data set that it was given")
    require(after.n_clients == N_CLIENTS, f"poison returned {after.n_clients} of {N_CLIENTS} clients")
    require((after.examples >= before.examples).all(), "attackers have fewer samples")
    for client in set(range(N_CLIENTS)) - set(_ATTACKERS):
        own, poisoned = (
            data.train.take(data.order[data.indptr[client] : data.indptr[client + 1]]) for data in (before, after)
        )
        equal = np.array_equal(own.features, poisoned.features) and np.array_equal(own.labels, poisoned.labels)
        require(equal, f"the samples of client {client}, which is honest, are others")
    for part in ("validation", "test"):
        require(getattr(after, part) is getattr(before, part), f"the {part} samples are others")


def attackers_change_the_sum_and_no_bits(attack: Attack) -> None:
    """Train three of eleven clients for a round of FedAvg, as honest ones and as attackers."""
    method, attackers = FedAvg(), np.array(_ATTACKERS)
    others = Chunk(1, 1, np.setdiff1d(np.arange(N_CLIENTS), attackers), {})
    chunk, results = Chunk(1, 0, attackers, {}, watched=(others,)), []
    for task in (_task(None), _task(attack)):
        broadcast = method.broadcast(method.init(task), task, 1).arrays
        results.append(method.train(broadcast, chunk, task))
    honest, attacked = results
    same = np.array_equal(honest.ledger.uplink_bits, attacked.ledger.uplink_bits)
    require(same, "attackers send other numbers of bits")
    if attack.attacks_in(1):
        differs = any(not np.array_equal(values, attacked.partial[name]) for name, values in honest.partial.items())
        require(differs, "an attack in round 1 changes nothing")


def digest_of(attack: Attack) -> str:
    """Return the sha256 of the claims, and of the samples on which attackers train."""
    adversary = _task(attack).adversary
    assert adversary is not None
    return digest({"claims": _claims(attack)[0]}) + str(getattr(adversary.data, "digest", ""))


LAWS = (
    claims_are_one_change_for_each_attacker,
    claims_depend_on_their_arguments_alone,
    the_order_of_honest_clients_does_not_matter,
    samples_of_honest_clients_stay,
    attackers_change_the_sum_and_no_bits,
)
