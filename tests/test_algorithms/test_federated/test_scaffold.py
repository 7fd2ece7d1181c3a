"""SCAFFOLD: Algorithm 1 by a loop in numpy, and control variates that follow from what is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from digits import digits, make_task, relative_error, run
from narrowcast.algorithms.client.uploads import COUNT_BITS
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.scaffold import Scaffold
from narrowcast.algorithms.local_training.rules import StepDecay
from narrowcast.laws.small_tasks import PLAN, task_of
from narrowcast.laws.small_tasks import run as rehearse
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.seeds import stream_keys
from narrowcast.platform.types import Chunk, LocalTerms
from quadratics import quadratics
from running import local

UNEQUAL, COUNTS = [1, 4, 10, 2, 7, 5], [20, 11, 8, 40, 0, 7]
UPLOADS = ("derived", "sent")


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("upload", UPLOADS)
def test_x_c_and_every_c_u_are_those_of_algorithm_1(upload: Any, momentum: float) -> None:
    """Unequal numbers of steps, two clients of six a round; y by a loop over steps."""
    task, _ = quadratics(steps=UNEQUAL, momentum=momentum)
    algorithm, rate = Scaffold(control_upload=upload, server_learning_rate=0.8), 0.1
    plan = Plan(rounds=7, clients_per_round=2, chunk_size=1)
    x, c, own = np.zeros(3), np.zeros(3), np.zeros((6, 3))
    for outcome in rounds(Run(plan, algorithm, task), local(algorithm, task)):
        changes = []
        for client in outcome.ledger.client.tolist():
            y, velocity = x.copy(), np.zeros(3)
            for _ in range(UNEQUAL[client]):
                gradient = task.data.curvatures[client] * (y - task.data.centres[client]) - own[client] + c
                velocity = momentum * velocity + gradient
                y = y - rate * velocity
            changes.append((client, y - x, -c + (x - y) / (UNEQUAL[client] * rate)))
        x = x + 0.8 * np.mean([change for _, change, _ in changes], axis=0)
        for client, _, control in changes:
            own[client] += control
            c = c + control / 6
    state = outcome.state
    assert state is not None
    assert np.abs(state.server["x"] - x).max() <= 1e-13
    assert np.abs(state.server["control/x"] - c).max() <= 1e-13
    assert np.abs(state.clients["control/x"] - own[state.participants]).max() <= 1e-13


TRAININGS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "clipping": {"clip_norm": 0.5},
    "schedule": {"learning_rate_schedule": StepDecay(every=1, decay=0.5)},
    "many epochs": {"epochs": 3},
}


@pytest.mark.parametrize("training", TRAININGS)
def test_a_derived_control_variate_is_the_one_that_is_sent(training: str) -> None:
    task = make_task(digits(COUNTS), **TRAININGS[training])
    derived, sent = (run(Scaffold(control_upload=each), task, n_rounds=4, clients=4) for each in UPLOADS)
    assert relative_error(derived.server, sent.server) <= 1e-6
    assert relative_error(derived.clients, sent.clients) <= 1e-6


def test_through_a_codec_it_is_that_of_the_decoded_change() -> None:
    task, stages = make_task(digits(COUNTS)), ({"kind": "quantise", "levels": 3, "scale": "max"}, "entropy")
    algorithm = Scaffold.model_validate({"codec": stages})
    server = algorithm.init(task)
    everyone = np.flatnonzero(COUNTS)
    broadcast = algorithm.broadcast(server, task, 1).arrays
    state = {name: np.array(values[everyone]) for name, values in algorithm.init_clients(task).items()}
    chunk = Chunk(1, 0, everyone, state)
    result = algorithm.train(broadcast, chunk, task)
    updates = task.training.train(algorithm.final(server), chunk, task, LocalTerms())
    codec, keys = Codec(algorithm.codec), stream_keys(task.seed, "codec", 1, everyone)
    shapes = {name: values.shape[1:] for name, values in updates.changes.items()}
    for place, client in enumerate(everyone.tolist()):
        change = {name: values[place] for name, values in updates.changes.items()}
        decoded = codec.decode(codec.encode(change, int(keys[place])).data, shapes, int(keys[place]))
        steps = -(-COUNTS[client] // 8)
        for name, values in decoded.items():
            assert np.abs(result.state[f"control/{name}"][place] + values / (steps * 0.1)).max() <= 1e-5
            assert len(np.unique(values)) <= 7 < len(np.unique(change[name])) or values.size < 17


def test_an_upload_is_that_of_fedavg_and_the_number_of_steps() -> None:
    task = task_of(MLP(hidden=(16,)))
    fedavg, derived, sent, gradient = (
        rehearse(PLAN, each, task)
        for each in (FedAvg(), Scaffold(), Scaffold(control_upload="sent"), Scaffold(control="gradient"))
    )
    for plain, ours, paper, first in zip(fedavg, derived, sent, gradient, strict=True):
        assert (ours.ledger.uplink_bits == plain.ledger.uplink_bits + COUNT_BITS).all()
        header = 2 * plain.ledger.uplink_bits - paper.ledger.uplink_bits
        assert (header == header[0]).all() and 0 < header[0] <= 128
        assert (first.ledger.uplink_bits == paper.ledger.uplink_bits).all()
        assert (ours.ledger.downlink_bits == paper.ledger.downlink_bits).all()
    broadcast = Scaffold().broadcast(Scaffold().init(task), task, 1).arrays
    known = Scaffold().upload_bits(broadcast, task, derived[0].ledger.client)
    assert known is not None and known.tolist() == derived[0].ledger.uplink_bits.tolist()


def test_the_gradient_of_option_1_is_not_derived() -> None:
    with pytest.raises((UserError, ValueError), match="control_upload = derived goes with control = update"):
        Scaffold(control="gradient", control_upload="derived")
