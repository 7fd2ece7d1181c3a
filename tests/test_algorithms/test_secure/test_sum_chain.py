"""The geometric median as a chain of secure sums: its z is that in the clear; bits, dropouts, refusals."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from narrowcast.algorithms.client.client_pass import ClientPass
from narrowcast.algorithms.codecs.messages import DensePayload
from narrowcast.algorithms.federated.aggregator import AggregationContext, GeometricMedian
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.secure.answered_rounds import AnsweredRounds
from narrowcast.algorithms.secure.messages import EnvelopeFormat
from narrowcast.algorithms.secure.sum_chain import SumChain
from narrowcast.experiment import Experiment, load_experiment
from narrowcast.platform.contracts import Executor, Task
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.rounds.ledger import ChunkResult
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Arrays, Chunk, LocalUpdates
from running import begin
from secure_rounds import dataset, experiment, prepared, run_rounds, sha256

CLIP, BITS, NU, ITERATIONS, CLIENTS = 0.5, 16, 1e-5, 3, 8
SUMS = ITERATIONS + 1
STEP = CLIP / 2 ** (BITS - 1)
SMALL = ("rounds=1", f"clients_per_round={CLIENTS}", "model.hidden=[4]", "training.epochs=1")
GRID = f"bits: {BITS}, clip: {CLIP}"
PLAIN, MASKED = f"{{kind: plain, {GRID}}}", f"{{kind: masked, {GRID}}}"


def robust(secure: str, *settings: str) -> Experiment:
    rule = f"{{kind: geometric_median, iterations: {ITERATIONS}}}"
    algorithm = f"algorithm={{kind: fedavg, aggregator: {rule}}}"
    return experiment(secure, algorithm, *SMALL, *settings, name="fedavg-digits")


def row(tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate([np.asarray(tensors[name], dtype=np.float64).ravel() for name in sorted(tensors)])


class Recording(GeometricMedian):
    """Keeps the changes of a round."""

    kind: Literal["recording"] = "recording"  # type: ignore[assignment]
    held: ClassVar[list[tuple[Arrays, NDArray[Any]]]] = []

    def aggregate(self, changes: Arrays, weights: NDArray[Any], context: AggregationContext) -> Arrays:
        self.held.append((changes, weights))
        return super().aggregate(changes, weights, context)


def changes_of(chosen: Experiment) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the changes [C, P] and weights [C] of the clients in round 1, by client, of a run in the clear."""
    Recording.held.clear()
    algorithm = FedAvg(aggregator=Recording(iterations=ITERATIONS))
    chosen = chosen.model_copy(update={"chunk_size": CLIENTS})
    task = chosen.task(dataset(chosen.data))
    list(rounds(Run(chosen, algorithm, task), LocalExecutor(Run(chosen, algorithm, task))))
    changes, weights = Recording.held[0]
    vectors = [row({name: values[client] for name, values in changes.items()}) for client in range(len(weights))]
    return np.stack(vectors), weights


def moved(chosen: Experiment, outcome: Outcome) -> NDArray[Any]:
    """Return by how much a round of a run moved the model, [P]."""
    assert outcome.state is not None
    algorithm, task = prepared(chosen)
    return row(algorithm.final(outcome.state.server)) - row(algorithm.final(begin(algorithm, task).server))


def by_hand(
    changes: NDArray[Any], weights: NDArray[Any], most: int, present: Sequence[NDArray[Any]] | None = None
) -> NDArray[Any]:
    """Return z of the changes on the grid, with integers for pulls, over the clients that are present in each sum."""
    gridded = np.clip(np.floor(changes / STEP + 0.5), -(2 ** (BITS - 1)), 2 ** (BITS - 1)).astype(int)
    clipped, distances, z = np.clip(changes, -CLIP, CLIP), np.zeros(len(changes)), np.zeros(0)
    of_largest = int(np.ceil(16 * 2 * CLIP * np.sqrt(changes.shape[1]) / NU))
    for left in present or [np.arange(len(changes))] * SUMS:
        pulls = [
            max(1, round(of_largest * weight / most * NU / max(NU, distance)))
            for weight, distance in zip(weights, distances, strict=True)
        ]
        z = sum(pulls[client] * gridded[client] for client in left) * STEP / sum(pulls[client] for client in left)
        distances = np.sqrt(np.square(clipped - z).sum(axis=1))
    return np.asarray(z)


def most_examples(chosen: Experiment) -> int:
    return int(chosen.task(dataset(chosen.data)).data.examples.max())


@pytest.mark.parametrize("weights", ["examples", "equal"])
def test_it_is_the_median_of_gridded_changes_with_whole_pulls(weights: str) -> None:
    settings = ("secure.rounding=nearest", f"algorithm.weights={weights}", "data.partition=dirichlet")
    clear, hidden = (robust(secure, *settings) for secure in (PLAIN, MASKED))
    played = [run_rounds(clear), run_rounds(hidden)]
    assert sha256(clear, played[0]) == sha256(hidden, played[1])
    changes, examples = changes_of(clear)
    assert len(set(examples.tolist())) > 1
    assert np.abs(changes).max() < CLIP
    of_largest = most_examples(clear) if weights == "examples" else 1
    wanted = by_hand(changes, examples if weights == "examples" else np.ones(CLIENTS), of_largest)
    assert moved(hidden, played[1][0]) == pytest.approx(wanted, abs=1e-7)


def test_every_scheme_gives_the_same_model_to_the_bit() -> None:
    schemes = ("plain", "masked", "ckks")
    runs = [
        robust(f"{{kind: {kind}, bits: 16}}", "algorithm.aggregator.nu=0.01", "rounds=2", f"chunk_size={size}")
        for kind, size in zip(schemes, (8, 3, 8), strict=True)
    ]
    assert len({sha256(run, run_rounds(run)) for run in runs}) == 1


def test_it_is_the_median_in_the_clear_to_the_rounding_of_the_grid() -> None:
    """The bound follows the error of z from sum to sum, in the L2 norm, by the triangle inequality alone."""
    hidden, clear = robust("{kind: masked, bits: 24, clip: 0.5, rounding: nearest}"), robust("none")
    changes, weights = changes_of(clear)
    values, shares = changes.shape[1], weights / weights.sum()
    rounding = CLIP / 2**24 * np.sqrt(values) + 1e-6  # half a step for each value, and float32
    finest = 16 * 2 * CLIP * np.sqrt(values)  # the pull of the largest weight at this distance is 1
    z, error = shares @ changes, rounding
    for _ in range(ITERATIONS):
        distances = np.linalg.norm(changes - z, axis=1)
        assert distances.min() > NU + error
        whole = 0.5 * distances / finest * most_examples(clear) / weights
        share = (error / (distances - error) + whole).max()
        pulls = shares / distances
        pulls /= pulls.sum()
        error = rounding + 2 * share / (1 - share) * (pulls @ distances)
        z = pulls @ changes
    assert moved(clear, run_rounds(clear)[0]) == pytest.approx(z, abs=1e-7)
    far = np.linalg.norm(moved(hidden, run_rounds(hidden)[0]) - z)
    mean = np.linalg.norm(shares @ changes - z)
    assert far <= error < mean / 4


def test_the_ledger_counts_the_bytes_of_all_sums_and_means(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, seal = dict[int, int](), EnvelopeFormat.seal

    def weighed(self: EnvelopeFormat, client: int, bodies: list[bytes | None], key: bytes) -> bytes:
        data = seal(self, client, bodies, key)
        sent[client] = sent.get(client, 0) + 8 * len(data)
        return data

    monkeypatch.setattr(EnvelopeFormat, "seal", weighed)
    chosen = robust(MASKED)
    (outcome,) = run_rounds(chosen)
    ledger = outcome.ledger
    assert dict(zip(ledger.client.tolist(), ledger.uplink_bits.tolist(), strict=True)) == sent
    one_sum = experiment(MASKED, *SMALL, "secure.smallest_group=5", name="fedavg-digits")  # as many must arrive
    (mean,) = run_rounds(one_sum)
    _, task = prepared(chosen)
    model = 8 * len(DensePayload.of(task.initial_parameters()).to_bytes())
    keys = mean.ledger.downlink_bits - model
    assert ledger.downlink_bits.tolist() == (SUMS * keys + model + ITERATIONS * model).tolist()
    upload_bits = ledger.uplink_bits / task.profiles.uplink_bits_per_second[ledger.client]
    download = ledger.downlink_bits / task.profiles.downlink_bits_per_second[ledger.client]
    compute = mean.ledger.seconds - mean.ledger.uplink_bits / task.profiles.uplink_bits_per_second[ledger.client]
    compute -= mean.ledger.downlink_bits / task.profiles.downlink_bits_per_second[ledger.client]
    assert ledger.seconds == pytest.approx(compute + upload_bits + download)


@dataclass(frozen=True)
class Vanishing(Executor):
    """Loses the upload of clients in one sum, by its number in the run; they would deliver in the next ones."""

    executor: LocalExecutor
    places: Mapping[int, Sequence[int]]
    delivered: dict[int, NDArray[Any]] = field(default_factory=dict)

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        cohort = np.sort(np.concatenate([chunk.clients for chunk in chunks]))
        lost = cohort[list(self.places.get(chunks[0].key_round, ()))]
        results = self.executor.train(
            broadcast, [replace(chunk, lost=~chunk.arrives() | np.isin(chunk.clients, lost)) for chunk in chunks]
        )
        arrived = [result.ledger.client[result.ledger.delivered] for result in results]
        self.delivered[chunks[0].key_round] = np.searchsorted(cohort, np.sort(np.concatenate(arrived)))
        return results


def vanishing(chosen: Experiment, places: Mapping[int, Sequence[int]], **more: Any) -> tuple[list[Outcome], Vanishing]:
    algorithm, task = prepared(chosen)
    key_store, run = algorithm.key_store(), Run(chosen, algorithm, task)
    executor = Vanishing(LocalExecutor(run, key_store), places)
    return list(rounds(run, executor, more.get("state"), algorithm.rounds(key_store, task))), executor


@pytest.mark.parametrize("secure", [PLAIN, MASKED, f"{{kind: masked, adversary: active, {GRID}}}"])
@pytest.mark.parametrize("chunk_size", [3, 8])
def test_a_client_that_vanishes_between_sums_is_in_none_of_the_later_ones(secure: str, chunk_size: int) -> None:
    chosen = robust(secure, "secure.rounding=nearest", f"chunk_size={chunk_size}", "secure.threshold=0.7")
    (outcome,), executor = vanishing(chosen, {2: [1], 4: [6]})
    everyone = np.arange(CLIENTS)
    present = [everyone, np.delete(everyone, 1), np.delete(everyone, 1), np.delete(everyone, [1, 6])]
    for number, left in enumerate(present, start=1):
        assert executor.delivered[number].tolist() == left.tolist()
    assert outcome.ledger.delivered.tolist() == np.isin(everyone, present[-1]).tolist()
    assert len(set(outcome.ledger.uplink_bits.tolist())) <= 2, "who vanished has paid for the round"
    changes, weights = changes_of(chosen)
    wanted = by_hand(changes, weights, most_examples(chosen), present)
    assert moved(chosen, outcome) == pytest.approx(wanted, abs=1e-7)


def test_clients_that_stop_answering_in_a_sum_take_part_in_none_of_the_later_ones() -> None:
    chosen = robust(f"{{kind: masked, {GRID}, dropout: 0.02, rounding: nearest, threshold: 0.55}}", "rounds=4")
    outcomes, executor = vanishing(chosen, {})
    numbers = [[SUMS * (each.record.round - 1) + k for k in range(1, SUMS + 1)] for each in outcomes]
    of_sums = [executor.delivered[number].tolist() for number in numbers[0] if number in executor.delivered]
    assert all(set(later) <= set(earlier) for earlier, later in pairwise(of_sums))
    fewer = [len(executor.delivered.get(round_numbers[-1], [])) for round_numbers in numbers]
    assert min(fewer) < CLIENTS, "dropouts are drawn for each sum"
    full = next(place for place, count in enumerate(fewer) if count)
    assert outcomes[full].record.delivered == fewer[full]


def test_a_sum_of_too_few_ends_the_round_and_the_model_stays(caplog: pytest.LogCaptureFixture) -> None:
    chosen = robust(MASKED)
    (outcome,), executor = vanishing(chosen, {2: [0, 1], 3: [2, 3]})
    assert outcome.record.delivered == 0
    assert not moved(chosen, outcome).any()
    assert max(executor.delivered) == 3
    assert "4 of 8 clients arrived, and the sum of fewer than 5 is not opened" in caplog.text


@dataclass(frozen=True)
class Elsewhere(Executor):
    """Trains each chunk of each sum on a copy in another memory, as a host that has just started would."""

    run: Run
    key_store: Any

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        copies = [LocalExecutor(pickle.loads(pickle.dumps(self.run)), self.key_store) for _ in chunks]
        return [copy.train(broadcast, [chunk])[0] for copy, chunk in zip(copies, chunks, strict=True)]


@pytest.mark.slow
def test_clients_train_once_for_all_sums_and_again_on_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, train = list[int](), ClientPass.each_update

    def counted(self: ClientPass, broadcast: Arrays, chunk: Chunk, task: Task) -> LocalUpdates:
        trained.append(chunk.index)
        return train(self, broadcast, chunk, task)

    monkeypatch.setattr(ClientPass, "each_update", counted)
    chosen = robust(MASKED, "rounds=2", "chunk_size=3")
    algorithm, task = prepared(chosen)
    key_store, run = algorithm.key_store(), Run(chosen, algorithm, task)
    here = run_rounds(chosen)
    assert trained == [0, 1, 2] * 2
    there = list(rounds(run, Elsewhere(run, key_store), None, algorithm.rounds(key_store, task)))
    assert trained == [0, 1, 2] * 2 + [0, 1, 2] * 2 * SUMS
    assert sha256(chosen, there) == sha256(chosen, here)


def test_a_resumed_run_has_the_same_model() -> None:
    chosen = robust(MASKED, "rounds=3", "checkpoint_every=1")
    straight = run_rounds(chosen)
    assert sha256(chosen, run_rounds(chosen, state=straight[0].state)) == sha256(chosen, straight)


@dataclass(frozen=True)
class Failing(Executor):
    """Fails in one sum, by its number in the run."""

    executor: LocalExecutor
    number: int

    def train(self, broadcast: Arrays, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        if chunks[0].key_round == self.number:
            raise RunFailed("the process is gone")
        return self.executor.train(broadcast, chunks)


@pytest.mark.slow
def test_a_round_that_failed_between_its_sums_is_answered_as_it_was_and_goes_on(tmp_path: Path) -> None:
    chosen, answered = robust(MASKED, "rounds=2"), tmp_path / "answered.jsonl"
    algorithm, task = prepared(chosen)
    run = Run(chosen, algorithm, task)

    def played(number: int, places: Mapping[int, Sequence[int]], record: Path = answered) -> list[Outcome]:
        key_store = algorithm.key_store(record)
        executor: Any = Failing(LocalExecutor(run, key_store), number)
        return list(rounds(run, Vanishing(executor, places), None, algorithm.rounds(key_store, task)))

    with pytest.raises(RunFailed, match="the process is gone"):
        played(3, {})
    assert AnsweredRounds(answered).last == 3, "the clients of the third sum had made their keys"
    copy = Path(shutil.copy(answered, tmp_path / "copy.jsonl"))
    assert played(0, {1: [0]}, copy)[0].record.delivered == 0, "the first sum is not opened over other clients"
    assert sha256(chosen, played(0, {})) == sha256(chosen, run_rounds(chosen))
    assert AnsweredRounds(answered).last == 2 * SUMS


def test_late_clients_are_those_whose_sums_all_together_come_too_late() -> None:
    in_time = run_rounds(robust(MASKED, "fleet=lognormal"))[0].ledger
    deadline = float(np.sort(in_time.seconds)[-2:].mean())
    chosen = robust(MASKED, "fleet=lognormal", f"deadline_seconds={deadline}")
    (outcome,) = run_rounds(chosen)
    assert outcome.ledger.late.tolist() == (in_time.seconds > deadline).tolist()
    assert outcome.record.delivered == CLIENTS - 1


def test_outliers_that_follow_the_protocol_move_the_median_little() -> None:
    rule = SumChain(GeometricMedian(iterations=8), 4.0, 1)
    assert rule.sums == 9
    assert rule.least_senders == 10
    chosen = robust("{kind: masked, rounding: nearest}")
    algorithm, task = prepared(chosen)
    # Two of eight clients scale what they have learnt by -20 before it is weighed, clipped and masked.
    wild = type("Wild", (FedAvg,), {"tamper": _scaled})(aggregator=algorithm.algorithm.aggregator)
    tampered = replace(algorithm, algorithm=wild)
    key_store, run = tampered.key_store(), Run(chosen, tampered, task)
    (outcome,) = rounds(run, LocalExecutor(run, key_store), None, tampered.rounds(key_store, task))
    changes, weights = changes_of(chosen)
    honest = moved(chosen, run_rounds(chosen)[0])
    sent = changes * np.where(np.arange(CLIENTS) < 2, -20, 1)[:, None]
    mean_moves = np.linalg.norm(weights @ sent / weights.sum() - honest)
    assert 0 < np.linalg.norm(moved(chosen, outcome) - honest) < mean_moves / 5


def _scaled(self: Any, broadcast: Arrays, chunk: Chunk, task: Task, updates: LocalUpdates) -> LocalUpdates:
    del self, broadcast, task
    return updates.scaled(np.where(chunk.clients < np.sort(chunk.clients)[2], -20.0, 1.0))


@pytest.mark.parametrize(("clients", "told"), [(3, True), (4, True), (5, False)])
def test_as_many_sums_as_clients_tell_each_change_and_one_client_more_hides_them(clients: int, told: bool) -> None:
    """The rank of the map from changes to sums: it is that of the changes if a server can solve for them."""
    values, sums, draw = 7, 4, np.random.default_rng(0)
    changes = draw.normal(size=clients * values)

    def opened(flat: NDArray[Any]) -> NDArray[Any]:
        rows, pulls, seen = flat.reshape(clients, values), np.ones(clients), []
        for _ in range(sums):
            seen += [*(pulls @ rows), pulls.sum()]
            pulls = 1 / np.linalg.norm(rows - pulls @ rows / pulls.sum(), axis=1)
        return np.array(seen)

    steps = 1e-6 * np.eye(changes.size)
    slopes = [(opened(changes + step) - opened(changes - step)) / 2e-6 for step in steps]
    rank = np.linalg.matrix_rank(np.stack(slopes), tol=1e-6)
    assert (rank == changes.size) == told


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm.aggregator.tolerance=0.01"], r"aggregator.tolerance = 0.01 ends iterations by what they find"),
        (["algorithm.aggregator.iterations=5"], r"6 sums by algorithm.aggregator .* opened over 7 or more: 5 clients"),
        (
            ["algorithm.codec=[{kind: quantise, levels: 3}]"],
            r"algorithm.codec \(quantise\) sends cannot be added up",
        ),
        (["algorithm.aggregator={kind: nnm, rule: geometric_median}"], r"algorithm.aggregator = nnm needs the change"),
        (["secure.bits=32", "algorithm.aggregator.nu=1e-9"], r"bits are for the weights of algorithm.aggregator"),
    ],
    ids=["tolerance", "few clients", "codec", "mixing first", "width"],
)
def test_what_it_cannot_do_is_refused_in_one_line(settings: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        prepared(robust(MASKED, *settings))
    assert "\n" not in str(refused.value)


def test_a_buffered_schedule_is_refused() -> None:
    settings = ["algorithm={kind: fedavg, aggregator: geometric_median}", "secure=masked", "schedule=buffered"]
    with pytest.raises(UserError, match="use schedule = synchronous"):
        _ = load_experiment("fedavg-digits", settings).secured_algorithm
