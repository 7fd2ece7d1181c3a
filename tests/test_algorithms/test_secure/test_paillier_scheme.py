"""Paillier as a scheme of secure sums: packed values, the sum to the bit, and what is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.federated.fedmavg import SFMF, FedMAvg
from narrowcast.algorithms.local_training.ratings import RatingSGD
from narrowcast.algorithms.secure.aggregation import SecureAggregation
from narrowcast.algorithms.secure.paillier import Paillier, pack, unpack
from narrowcast.algorithms.secure.schemes import FixedPoint, Masked, Plain, Protection
from narrowcast.laws.small_tasks import N_CLIENTS, task_of
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.factorisation import ROW_FACTORS, MaskedFactorisation
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run


def secured(plain: Any, scheme: Protection, task: Task, plan: Plan) -> list[Outcome]:
    algorithm: Any = SecureAggregation(plain, scheme, N_CLIENTS)
    algorithm.check(task)
    run, key_store = Run(plan, algorithm, task), algorithm.key_store()
    return list(rounds(run, LocalExecutor(run, key_store), None, algorithm.rounds(key_store, task)))


@pytest.mark.parametrize("width", [2, 27, 34, 63])
def test_packed_sums_are_the_sums(width: int) -> None:
    random, half = np.random.default_rng(width), 2 ** (width - 1)
    first = random.integers(-half // 2, half // 2, 200)
    second = random.integers(-half // 2, half // 2, 200)
    first[:3], second[:3] = [-half // 2, half // 2 - 1, 0], [-half // 2, half // 2 - 1, -1]
    each = 3070 // width
    total = [one + other for one, other in zip(pack(first, each, width), pack(second, each, width), strict=True)]
    assert np.array_equal(unpack(total, each, width, 200), first + second)
    assert max(abs(number) for number in total) < 2**3070


def test_ninety_values_of_34_bits_are_in_a_ciphertext() -> None:
    numbers = FixedPoint(clip=1, bits=24, rounding="nearest", max_weight=610, max_clients=610)
    assert numbers.value_bits == 34
    assert Paillier().values_each(numbers) == 90


def test_the_sum_is_that_of_plain_integers_to_the_bit() -> None:
    task = task_of(MaskedFactorisation(rank=2), training=RatingSGD(learning_rate=0.01))
    plan = Plan(rounds=1, clients_per_round=N_CLIENTS, chunk_size=4, checkpoint_every=1, evaluate_every=1)

    schemes = Plain(bits=20, clip=0.5), Paillier(bits=20, clip=0.5)
    clear, encrypted = (secured(SFMF(), scheme, task, plan)[-1] for scheme in schemes)
    states = [each.state for each in (clear, encrypted) if each.state is not None]
    assert len({model_sha256(SFMF(), state) for state in states}) == 1
    # 80 values and a weight in one ciphertext of 6,144 bits each, and the sum sent back once
    assert 6144 * N_CLIENTS < encrypted.record.uplink_bits < 8000 * N_CLIENTS


def test_fedmavg_under_masks_is_that_of_plain_integers() -> None:
    task = task_of(MaskedFactorisation(rank=2))
    plan = Plan(rounds=2, clients_per_round=N_CLIENTS, chunk_size=4, checkpoint_every=1, evaluate_every=1)
    plain, masked = (secured(FedMAvg(), scheme(bits=24), task, plan)[-1].state for scheme in (Plain, Masked))
    clear = list(rounds(Run(plan, FedMAvg(), task), LocalExecutor(Run(plan, FedMAvg(), task)), None))[-1].state
    assert plain is not None
    assert masked is not None
    assert clear is not None
    assert model_sha256(FedMAvg(), plain) == model_sha256(FedMAvg(), masked)
    assert np.abs(plain.server[ROW_FACTORS] - clear.server[ROW_FACTORS]).max() < 1e-6
    for algorithm, said in ((FedMAvg(senders=3), "leave out algorithm.senders"), (SFMF(rows="touched"), "rows = all")):
        with pytest.raises(UserError, match=said):
            algorithm.sum_layout(task, N_CLIENTS)


@pytest.mark.parametrize("bits", [2048, 3073])
def test_a_weak_or_odd_key_is_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="key_bits"):
        Paillier(key_bits=bits)
