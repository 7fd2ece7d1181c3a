"""FedAvg without a server: its model bit for bit or but for the order of additions, and the bits of every client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from digits import digits, make_task, plain_client, relative_error, train
from narrowcast.algorithms.attacks.inversion import cosines
from narrowcast.algorithms.attacks.trigger import Trigger
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.server_free import ServerFree, ring_sum
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.rounds.adversary import recruited
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import arrays_sha256
from running import local

COUNTS = [20, 12, 9, 16, 8, 14, 10, 11, 7, 13, 15]
TASK = make_task(digits(COUNTS), MLP(hidden=(6,), dtype="float64"))
VALUES = 64 * 6 + 6 + 6 * 10 + 10
WHOLE = 8 * (8 + 2 + 8 * VALUES)
"""A message of the model: a header of 8 bytes, the number of values in two, the values in float64."""
CODED = {"codec": [{"kind": "quantise", "levels": 4, "scale": "max"}, "entropy"]}


def outcomes(algorithm: Any, clients: int = 11, n_rounds: int = 5, task: Task = TASK, **plan: Any) -> Iterator[Outcome]:
    settings = Plan(rounds=n_rounds, clients_per_round=clients, chunk_size=4, checkpoint_every=1, **plan)
    run = Run(settings, algorithm, task)
    run.check()
    return rounds(run, local(algorithm, task))


def attacked(client: int, round_index: int) -> Task:
    """The task with a client that poisons its images, and counts itself alone as the server, in one round."""
    attack = Trigger(size=2, share=1, attackers=(client,), first_round=round_index, every=100, serving="alone")
    return replace(TASK, adversary=recruited(attack, TASK.data, None, TASK.seed, TASK.private_seed))


@pytest.mark.parametrize(
    "fields", [{}, CODED, {"server_optimizer": "adam", "aggregator": "median"}], ids=["plain", "coded", "robust"]
)
def test_an_elected_server_has_the_model_of_fedavg_and_bills_its_cohort(fields: dict[str, Any]) -> None:
    algorithm = ServerFree.model_validate(fields)
    slots = 2 if "server_optimizer" in fields else 0
    state_bits = 8 * (8 + 2 + 8 * VALUES * (1 + slots))
    with_server = outcomes(FedAvg.model_validate(fields), clients=7)
    for index, (got, wanted) in enumerate(zip(outcomes(algorithm, clients=7), with_server, strict=True)):
        assert got.state is not None
        assert wanted.state is not None
        assert arrays_sha256(algorithm.final(got.state.server)) == arrays_sha256(algorithm.final(wanted.state.server))
        uploads, sent = wanted.ledger.uplink_bits.tolist(), got.ledger.uplink_bits.tolist()
        received = got.ledger.downlink_bits.tolist()
        for place, upload in enumerate(uploads):
            serves = place == index % 7
            assert sent[place] == (6 * WHOLE + state_bits if serves else upload)
            assert received[place] == (sum(uploads) - upload + state_bits if serves else WHOLE)
        assert sum(sent) == sum(received)  # with unicast whatever is sent is received
        assert got.record.uplink_bits == sum(sent)


def test_an_elected_server_that_all_hear_sends_the_model_once_and_takes_its_time() -> None:
    unicast, broadcast = (
        list(outcomes(ServerFree(transmission=name), n_rounds=2))  # type: ignore[arg-type]
        for name in ("unicast", "broadcast")
    )
    for apart, together in zip(unicast, broadcast, strict=True):
        assert apart.record.uplink_bits - together.record.uplink_bits == 9 * WHOLE
        assert apart.record.downlink_bits == together.record.downlink_bits
    server, profiles = 0, TASK.profiles
    seconds = [outcomes[0].ledger.seconds[server] for outcomes in (unicast, broadcast)]
    assert seconds[0] - seconds[1] == pytest.approx(9 * WHOLE / profiles.uplink_bits_per_second[server])


def test_servers_are_drawn_by_the_seed() -> None:
    drawn = ServerFree(election="drawn")
    places = [drawn.server(5, 3, index) for index in range(1, 200)]
    assert places == [drawn.server(5, 3, index) for index in range(1, 200)]
    assert np.bincount(places).min() > 20


@pytest.mark.parametrize("aggregator", [None, "median", "norm_clip"])
def test_an_elected_server_that_attacks_makes_the_model_its_own_whatever_the_rule(aggregator: str | None) -> None:
    algorithm, task = ServerFree.model_validate({"aggregator": aggregator}), attacked(0, 1)
    assert task.adversary is not None
    (outcome,) = outcomes(algorithm, n_rounds=1, task=task)
    assert outcome.state is not None
    wanted = plain_client(replace(task, data=task.adversary.data), algorithm.init(task), 0)
    assert relative_error(algorithm.final(outcome.state.server), wanted) < 1e-6  # the module has float32
    (honest,) = outcomes(algorithm, n_rounds=1)
    assert honest.state is not None
    assert relative_error(algorithm.final(honest.state.server), wanted) > 1e-2


def test_an_attacker_serves_alone_in_its_turn_and_is_a_client_in_other_rounds() -> None:
    """Of 11 clients, client 2 serves in round 3."""
    algorithm = ServerFree.model_validate({"aggregator": "median"})

    def models(task: Task) -> list[bytes]:
        states = [outcome.state for outcome in outcomes(algorithm, n_rounds=3, task=task)]
        return [arrays_sha256(algorithm.final(state.server)) for state in states if state]

    def as_client(task: Task) -> Task:
        assert task.adversary is not None
        attack = task.adversary.attack.model_copy(update={"serving": "honest"})
        return replace(task, adversary=replace(task.adversary, attack=attack))

    served, honest = models(attacked(2, 3)), models(TASK)
    assert [got == wanted for got, wanted in zip(served, honest, strict=True)] == [True, True, False]
    assert served[2] != models(as_client(attacked(2, 3)))[2]
    assert models(attacked(2, 2)) == models(as_client(attacked(2, 2)))


def test_nobody_attacks_as_the_server_of_an_algorithm_without_elections() -> None:
    with pytest.raises(UserError, match=r"attack\.serving = alone: algorithm\.kind = fedavg elects no client"):
        outcomes(FedAvg(), task=attacked(0, 1))


def test_a_ring_has_the_model_of_fedavg_and_bills_its_segments() -> None:
    algorithm, fedavg = ServerFree(exchange="ring"), FedAvg()
    sizes = [(VALUES + 1 + 10 - place) // 11 for place in range(11)]
    for index, (got, wanted) in enumerate(zip(outcomes(algorithm), outcomes(fedavg), strict=True)):
        assert got.state is not None
        assert wanted.state is not None
        assert relative_error(algorithm.final(got.state.server), fedavg.final(wanted.state.server)) < 1e-12
        sent = np.zeros(11, dtype=np.int64)
        for step in range(10):
            for client in range(11):
                for segment in (client - step, client + 1 - step):
                    sent[client] += 8 * (8 + 1 + 8 * sizes[segment % 11])
        assert got.ledger.uplink_bits.tolist() == sent.tolist()
        first = WHOLE if index == 0 else 0
        assert got.ledger.downlink_bits.tolist() == (np.roll(sent, 1) + first).tolist()
    values = (got.ledger.uplink_bits - 2 * 10 * 8 * 9) / 64
    assert np.abs(values / (VALUES + 1) - 2 * 10 / 11).max() < 1 / VALUES


def test_clients_that_were_not_in_the_last_round_of_a_ring_are_sent_the_model_by_the_one_before() -> None:
    before: set[int] = set()
    for outcome in outcomes(ServerFree(exchange="ring"), clients=4, n_rounds=6):
        clients, sent = outcome.ledger.client.tolist(), outcome.ledger.uplink_bits.sum()
        newcomers = len(set(clients) - before)
        handed = WHOLE * newcomers if before else 0
        assert sent == 2 * 3 * (8 * (4 * 9 + 8 * (VALUES + 1))) + handed
        assert outcome.ledger.downlink_bits.sum() == sent + (0 if before else 4 * WHOLE)
        before = set(clients)


def test_a_ring_adds_each_segment_from_its_own_client_on() -> None:
    parts = np.random.default_rng(0).standard_normal((5, 13)).astype(np.float32)
    wanted = np.zeros(13, dtype=np.float32)
    for column, first in enumerate(np.repeat(np.arange(5), (3, 3, 3, 2, 2))):
        for hop in range(5):
            wanted[column] += parts[(first + hop) % 5, column]
    assert ring_sum(parts).tobytes() == wanted.tobytes()


def test_the_next_client_of_a_ring_reads_an_image_at_hop_1_unless_masks_are_added() -> None:
    task = make_task(digits([1] * 4), MLP(hidden=(6,), dtype="float64"), learning_rate=1.0)
    (result,) = train(ServerFree(exchange="ring"), task)
    names = ("1.bias", "1.weight", "3.bias", "3.weight")
    parts = np.concatenate([result.partial[f"each/sum/{name}"].reshape(4, -1) for name in names], axis=1)
    drawn = 10 * np.random.default_rng(0).standard_normal(parts.shape)
    masked = parts + drawn - np.roll(drawn, 1, axis=0)
    images, read = task.data.train.features[task.data.order], 0
    for segment, row in enumerate((0, 2, 4)):  # the rows of the first layer that are whole in these segments
        place = slice(6 + 64 * row, 6 + 64 * (row + 1))
        if parts[segment, place].any():  # its unit is excited
            hops = np.cumsum(np.roll(parts, -segment, axis=0)[:, place], axis=0)
            seen = np.abs(cosines(np.stack([*hops, masked[segment, place]]), images[[segment]]))[:, 0]
            assert seen[0] == pytest.approx(1, abs=1e-6)
            assert seen[-1] < 0.5
            read += 1
    assert read
    assert np.abs(ring_sum(masked) - ring_sum(parts)).max() < 1e-12


@pytest.mark.parametrize(
    "fields",
    [{**CODED, "exchange": "ring"}, {"aggregator": "median", "exchange": "ring"}],
)
def test_nobody_sees_the_changes_in_a_ring(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"exchange = ring adds changes up on their way, without anybody"):
        ServerFree.model_validate(fields)
