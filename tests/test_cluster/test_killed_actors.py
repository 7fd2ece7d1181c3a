"""Killed hosts and drivers change no record and no state: client state, memories, schedules, secure sums."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from child_processes import kill_one
from narrowcast.algorithms.secure.aggregation import SecureAggregation
from narrowcast.cluster.backend import RayBackend
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.contracts import Executor
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.rounds.loop import Backend, LocalBackend, LocalExecutor, rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Arrays, Chunk
from running import begin
from sampling import sampled

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("shared_ray")]

# Forty epochs make a round last long enough to be killed in its midst.
DIGITS = ("rounds=6", "chunk_size=5", "training.epochs=40", "checkpoint_every=2", "evaluate_every=5")

# Algorithms with client state, or whose server needs every update.
STATEFUL = (
    {
        name: ("fedavg-digits", [*DIGITS, f"algorithm={algorithm}"])
        for name, algorithm in {
            "scaffold": "scaffold",
            "feddyn": "feddyn",
            "apfl": "apfl",
            "adaptive-apfl": "{kind: apfl, alpha_rate: 0.1}",
            "ditto": "ditto",
            "partial": "partial",
            "pfedme": "pfedme",
            "per_fedavg": "per_fedavg",
            "fine_tune": "fine_tune",
            "median": "{kind: fedavg, aggregator: median}",
            "scolr": "scolr",
        }.items()
    }
    | {
        attack: ("fedavg-digits", [*DIGITS, f"attack={attack}", "attack.attackers=0.4"])
        for attack in ("label_flip", "min_max")
    }
    | {"local": ("fedavg-digits", [*DIGITS, "algorithm=local", "evaluate_clients=[test]"])}
)

# Clients that keep factors of their own, of which few send anything.
FACTORS = {
    "fedmavg": (
        "fedavg-digits",
        [
            *("data={kind: explicit_ratings, set: ml-latest-small}", "model=masked_factorisation"),
            *("algorithm={kind: fedmavg, senders: 50}", "clients_per_round=610", "chunk_size=100", "rounds=4"),
            "training={kind: alternating_gradient, h_steps: 50, weight_decay: 1}",
            *("checkpoint_every=2", "evaluate_every=4"),
        ],
    )
}

# Algorithms whose server keeps more than the model, or needs more than the sum of changes.
SERVER_STATE = {
    name: ("fedavg-digits", [*DIGITS, "rounds=4", f"algorithm={algorithm}"])
    for name, algorithm in {
        "fednova": "{kind: fednova, partial_share: 0.5}",
        "qffl": "qffl",
        "afl": "afl",
        "submodel": "{kind: submodel, slices: disjoint, assignment: draw}",
        "adam": "{kind: fedavg, server_optimizer: adam, server_learning_rate: 0.03}",
    }.items()
} | {"fedma": ("fedavg-digits", [*DIGITS, "rounds=5", "algorithm=fedma", "data.clients=20", "model.hidden=[30]"])}

# Adapters whose server moves the frozen weights, and whose clients have ranks of their own.
ADAPTED = {
    name: (
        "fedavg-digits",
        [
            *(*DIGITS, "rounds=4", "model={kind: adapters, base: {kind: mlp, hidden: [30]}, rank: 4}"),
            f"algorithm={{kind: lora, {fields}}}",
        ],
    )
    for name, fields in {"stack": "combine: stack", "padded": "combine: padded, rank_policy: uniform"}.items()
}

# Clients whose networks are of three architectures and stay with them, measured one by one.
OWN_NETWORKS = {
    "fedmd": (
        "fedavg-digits",
        [
            *(*DIGITS, "rounds=5", "data={kind: digits, clients: 20, public: {samples: 100}}"),
            "algorithm={kind: fedmd, models: [{kind: mlp, hidden: [30]}, softmax, {kind: mlp, hidden: [20, 10]}]}",
            *("evaluate_clients=[test]", "evaluate_every=2"),
        ],
    )
}

# Two sub-networks of a graph network, each on an actor of its own, one of which is killed.
GRAPH = "{kind: block_model, clients: 2, nodes: 5000, blocks: 5, features: 64, clusters: 10}"
GIST = {
    name: (
        "fedavg-digits",
        [
            *(f"data={GRAPH}", "model={kind: gcn, hidden: [32, 16], layer_norm: graph}"),
            f"algorithm={{kind: submodel, widths: [0.5], slices: {name}, weights: equal, output_bias: kept}}",
            "training={kind: graph, epochs: 20, clusters_per_step: 2}",
            *("rounds=5", "clients_per_round=2", "chunk_size=1", "checkpoint_every=2", "evaluate_every=2"),
        ],
    )
    for name in ("disjoint", "stratified")
}

# Channel-adapted ranks and levels on a shared band, and codecs with state per client.
QUANTISED = "[{kind: quantise, levels: 10, norms: column, rounding: dithered, norm_type: bfloat16}, entropy]"
CHANNEL = f"{{kind: scolr, rank: 16, rank_policy: channel, aggregation: per_component_mean, codec: {QUANTISED}}}"
MEMORY = "{kind: fedmf, codec: [error_feedback, {kind: top_k, fraction: 0.1}, {kind: quantise, levels: 31}, entropy]}"
RADIO = "radio={{channel: {{kind: rayleigh, access: shared}}, allocation: {}, upload_seconds: 0.05}}"
FADING = {
    name: ("scolr-ml100k", [*DIGITS, "training.epochs=8", "clients_per_round=20", f"algorithm={algorithm}", radio])
    for name, algorithm, radio in (
        ("channel", CHANNEL, RADIO.format("min_error")),
        ("memory", MEMORY, RADIO.format("max_min")),
    )
}

SECURE = {
    scheme.strip("{").partition(",")[0]: (
        "scolr-ml100k",
        [
            *("algorithm={kind: scolr, rank: 3, rank_policy: uniform}", f"secure={scheme}", "model.embedding_dim=8"),
            *("clients_per_round=12", "chunk_size=4", "training.epochs=10"),
            *("rounds=4", "checkpoint_every=2", "evaluate_every=4"),
        ],
    )
    for scheme in ("{kind: ckks, ring: 4096, prime_bits: [48, 60], bits: 16}", "{kind: masked, bits: 16}")
} | {
    "chain": (
        "fedavg-digits",
        [
            *(*DIGITS, "rounds=4", "algorithm={kind: fedavg, aggregator: geometric_median}", "clients_per_round=12"),
            *("secure={kind: masked, dropout: 0.005, threshold: 0.51}", "chunk_size=4"),
        ],
    )
}

FLEET = "fleet={kind: lognormal, uplink_mbit_per_second: {median: 0.1, sigma: 1}}"
TIMED = {
    name: ("fedavg-digits", [*DIGITS, FLEET, "algorithm={kind: fedavg}", *settings])
    for name, settings in {
        "trained-twice": [
            "over_selection=1.3",
            "deadline_seconds=25",
            "algorithm.codec=quantise",
            "training.epochs=20",
        ],
        "partial": [
            *("deadline_seconds=20", "stragglers=partial", "clock.seconds_per_example=2e-3"),
            "availability={kind: bernoulli, probability: 0.1}",
        ],
        "buffered": ["schedule={kind: buffered, concurrency: 20, buffer_size: 10}"],
    }.items()
}
A_HOST, A_HOST_AND_A_DRIVER = {2: "ClientHost"}, {2: "ClientHost", 4: "Driver"}


def run_with_kills(experiment: Experiment, backend: Backend, kills: Mapping[int, str]) -> list[Outcome]:
    algorithm, task = experiment.secured_algorithm, experiment.task(experiment.data.load())
    outcomes = []
    for outcome in backend.run(Run(experiment, algorithm, task), begin(algorithm, task)):
        outcomes.append(outcome)
        if victim := kills.get(outcome.record.round):
            time.sleep(0.05)  # the driver is now at work on the next round
            kill_one(victim)
    return outcomes


def same_with_kills(name: str, settings: list[str], kills: Mapping[int, str]) -> list[Outcome]:
    """Return what happens in this process, the same as on two actors of which some are killed."""
    experiment = load_experiment(name, settings)
    alone, killed = (
        run_with_kills(experiment, LocalBackend(), {}),
        run_with_kills(experiment, RayBackend(actors=2), kills),
    )
    assert [repr(outcome.record) for outcome in killed] == [repr(outcome.record) for outcome in alone]
    states = [outcomes[-1].state for outcomes in (alone, killed)]
    assert states[0] is not None
    assert states[1] is not None
    shas = [model_sha256(experiment.secured_algorithm, state) for state in states if state is not None]
    assert shas[0] == shas[1]
    assert states[0].clients.keys() == states[1].clients.keys()
    for array, values in states[0].clients.items():
        assert np.array_equal(values, states[1].clients[array])
    return alone


LIKE_ANOTHER = {
    *("scaffold", "feddyn", "apfl", "adaptive-apfl", "pfedme", "per_fedavg", "fine_tune", "partial", "local"),
    *(
        "scolr",
        "label_flip",
        "median",
        "channel",
        "fednova",
        "qffl",
        "afl",
        "submodel",
        "fedma",
        "disjoint",
        "stratified",
        "ditto",
    ),
    *("fedmd", "fedmavg"),
    *("kind: ckks", "kind: masked", "padded"),
}
"""Cases of which another has the kind of state, of clients, of the server and of keys, for `make thorough`."""
KEPT_BY_CLIENTS = {**STATEFUL, **OWN_NETWORKS, **FADING}


@pytest.mark.parametrize(
    "case",
    [
        *sampled(KEPT_BY_CLIENTS, KEPT_BY_CLIENTS.keys() - LIKE_ANOTHER),
        *(pytest.param(case, marks=[pytest.mark.data("ml-latest-small"), pytest.mark.thorough]) for case in FACTORS),
    ],
)
def test_client_states_and_memories(case: str) -> None:
    last = same_with_kills(*{**KEPT_BY_CLIENTS, **FACTORS}[case], A_HOST)[-1].state
    assert last is not None
    assert all(values.any() for values in last.clients.values())


OF_SERVERS = {**SERVER_STATE, **ADAPTED}


@pytest.mark.parametrize("case", sampled(OF_SERVERS, OF_SERVERS.keys() - LIKE_ANOTHER))
def test_states_of_the_server(case: str) -> None:
    same_with_kills(*OF_SERVERS[case], A_HOST)


@pytest.mark.parametrize("case", sampled(GIST, GIST.keys() - LIKE_ANOTHER))
def test_sub_networks_of_a_graph(case: str) -> None:
    same_with_kills(*GIST[case], A_HOST)


@pytest.mark.parametrize("case", sampled(SECURE, SECURE.keys() - LIKE_ANOTHER))
def test_secure_sums_whose_keys_have_an_actor_of_their_own(case: str) -> None:
    same_with_kills(*SECURE[case], A_HOST)


@dataclass(frozen=True)
class DroppingFirst(Executor):
    """Drops the first chunk of round 1, as if its host had failed."""

    inner: LocalExecutor

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        results = self.inner.train(broadcast, chunks)
        dropped = [ChunkResult.of_dropped(chunk) for chunk in chunks if (chunk.round_index, chunk.index) == (1, 0)]
        return [*dropped, *results[len(dropped) :]]


def test_a_round_that_was_opened_without_a_chunk_is_repeated_without_it_by_every_driver(tmp_path: Path) -> None:
    settings = ["rounds=4", "chunk_size=3", "clients_per_round=12", "secure={kind: masked, threshold: 0.6}"]
    experiment = load_experiment("fedavg-digits", [*settings, "training.epochs=20", "checkpoint_every=4"])
    algorithm, task = experiment.secured_algorithm, experiment.task(experiment.data.load())
    run = Run(experiment, algorithm, task, tmp_path / "answered.jsonl")
    assert isinstance(algorithm, SecureAggregation)

    def dropping(answered: Path | None) -> Generator[Outcome, None, None]:
        key_store = algorithm.key_store(answered)
        executor = DroppingFirst(LocalExecutor(run, key_store))
        return rounds(run, executor, begin(algorithm, task), algorithm.rounds(key_store, task))

    *_, wanted = dropping(None)
    with closing(dropping(run.answered)) as interrupted:
        assert next(interrupted).record.delivered == 9
    outcomes = []
    for outcome in RayBackend(actors=2, on_failure="drop").run(run, begin(algorithm, task)):
        outcomes.append(outcome)
        if outcome.record.round == 2:
            time.sleep(0.05)
            kill_one("Driver")
    assert [outcome.record.delivered for outcome in outcomes] == [9, 12, 12, 12]
    assert wanted.state is not None
    assert outcomes[-1].state is not None
    assert model_sha256(algorithm, outcomes[-1].state) == model_sha256(algorithm, wanted.state)


@pytest.mark.parametrize("case", sampled(TIMED, {"trained-twice", "buffered"}))
def test_stragglers_availability_and_buffers(case: str) -> None:
    alone = same_with_kills(*TIMED[case], A_HOST_AND_A_DRIVER)
    assert sum(outcome.record.late for outcome in alone) > 0 or case in ("buffered", "partial")
