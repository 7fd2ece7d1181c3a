"""FedMA: a plain pass, FedAvg as its limit, what is sent in each round, who sits out, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from digits import digits, make_task, relative_error, run
from narrowcast.algorithms.codecs.messages import DensePayload, dense_wire_bits
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedma import OWN, FedMA, MatchingState
from narrowcast.algorithms.federated.unit_matching import Matching, UnitPrior, match_units
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.experiment import load_experiment
from narrowcast.laws.small_tasks import windows
from narrowcast.platform.contracts import Executor, Recipients, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import CNN, MLP, CharLSTM
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, Chunk
from running import local

COUNTS = [21, 8, 40, 12]
EVERYONE = np.arange(len(COUNTS))
BY_INDEX = Matching(units="by_index")


def task_of(model: str = "mlp", **training: Any) -> Task:
    if model == "mlp":
        return make_task(digits(COUNTS), MLP(hidden=(9, 6)), **training)
    if model == "cnn":
        return make_task(digits(COUNTS, images=True), CNN(channels=(4, 3), hidden=6), **training)
    return make_task(windows(np.array(COUNTS)), CharLSTM(embedding_dim=3, hidden=5, layers=1), **training)


def outcomes(algorithm: FedMA, task: Task, n_rounds: int, **plan: Any) -> list[Outcome]:
    algorithm.check(task)
    settings = {"clients_per_round": len(COUNTS), "chunk_size": 3, "checkpoint_every": 1, **plan}
    return list(rounds(Run(Plan(rounds=n_rounds, **settings), algorithm, task), local(algorithm, task)))


def server_after(each: Outcome) -> Arrays:
    assert each.state is not None
    return each.state.server


@pytest.mark.parametrize("divisor", ["owners", "clients"])
def test_a_pass_without_training_keeps_the_function_of_an_lstm_whose_units_split(divisor: Any) -> None:
    """Identical clients: the outputs of torch's own modules before and after, the second one with more units."""
    data = windows(np.array(COUNTS))
    model = CharLSTM(embedding_dim=3, hidden=5, layers=1, dtype="float64")
    task = make_task(data, model, learning_rate=1e-30)
    matching = Matching(unit_mean="owners", gamma=1e9, recurrent_mean=divisor)
    algorithm = FedMA(initial="same", matching=matching, head="equal")
    server = server_after(outcomes(algorithm, task, 3)[-1])
    before, after = task.initial_parameters(), algorithm.final(server)
    assert after["lstm.weight_hh_l0"].shape[1] > before["lstm.weight_hh_l0"].shape[1], "units have split"
    shown = torch.from_numpy(np.asarray(data.test.features))

    def outputs(parameters: Arrays) -> torch.Tensor:
        width, embedded = parameters["lstm.weight_hh_l0"].shape[1], parameters["lstm.weight_ih_l0"].shape[1]
        wide = CharLSTM(embedding_dim=embedded, hidden=width, layers=1, dtype="float64").module(data).double()
        wide.load_state_dict({name: torch.from_numpy(np.array(values)) for name, values in parameters.items()})
        with torch.no_grad():
            return wide(shown)

    error = (outputs(after) - outputs(before)).abs().max().item()
    assert (error <= 1e-12) == (divisor == "owners"), error


def trained_by_torch(task: Task, client: int, round_index: int, start: Arrays, frozen: set[str]) -> dict[str, Any]:
    """The parameters of a perceptron of any widths after local SGD, those that are frozen untouched."""
    weights = [name for name in start if name.endswith("weight")]
    layers: list[nn.Module] = [nn.Flatten()]
    for name in weights:
        layers += [nn.Linear(*reversed(start[name].shape)), nn.ReLU()]
    module = nn.Sequential(*layers[:-1])
    module.load_state_dict({name: torch.from_numpy(np.array(values)) for name, values in start.items()})
    free = [parameter for name, parameter in module.named_parameters() if name not in frozen]
    optimiser = torch.optim.SGD(free, task.training.learning_rate, task.training.momentum)
    one = np.array([client])
    keys = task.private_seed.stream_keys("shuffle", round_index, one)
    schedule = draw_schedule(task.data.examples[one], np.array([task.training.epochs]), task.training.batch_size, keys)
    own = task.data.order[task.data.indptr[client] : task.data.indptr[client + 1]]
    for batch, size in zip(schedule.samples, schedule.sizes, strict=True):
        picked = task.data.train.take(own[batch[:size]])
        loss = nn.functional.cross_entropy(module(torch.from_numpy(picked.features)), torch.from_numpy(picked.labels))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name: parameter.detach().numpy().copy() for name, parameter in module.named_parameters()}


def test_a_pass_is_the_plain_one() -> None:
    """The paper's Algorithm 1 by hand: inputs put in place by loops, layers frozen by torch."""
    task, algorithm = task_of(epochs=2, momentum=0.5), FedMA()
    seeds = task.private_seed.stream_keys("initial model", 0, EVERYONE)
    models = [task.model.init_server(task.data, int(seed >> np.uint64(1))) for seed in seeds]
    layers, known = ["1", "3", "5"], set[str]()
    for round_index, layer in enumerate(layers, 1):
        models = [trained_by_torch(task, u, round_index, models[u], known) for u in EVERYONE.tolist()]
        weight, bias = f"{layer}.weight", f"{layer}.bias"
        if layer == "5":
            labels = [task.data.train.labels[task.data.order[a:b]] for a, b in zip(*_bounds(task), strict=True)]
            counts = np.array([np.bincount(each, minlength=10) for each in labels], dtype=float)
            counts[:, counts.sum(axis=0) == 0] = np.array(COUNTS)[:, None]
            shares = counts / counts.sum(axis=0)
            for name in (weight, bias):
                mean = sum((share * model[name].T).T for share, model in zip(shares, models, strict=True))
                models = [{**model, name: mean} for model in models]
            break
        own = [np.c_[model[weight], model[bias]].astype(np.float64) for model in models]
        prior = UnitPrior(np.r_[np.zeros(own[0].shape[1] - 1), 0.1])
        matched = match_units(own, prior, generator(task.seed, "matching order", round_index))
        above = f"{layers[round_index]}.weight"
        for model, units in zip(models, matched.units, strict=True):
            placed = np.zeros((len(model[above]), len(matched.means)), dtype=np.float32)
            for mine, place in enumerate(units):
                placed[:, place] = model[above][:, mine]
            model |= {weight: np.float32(matched.means[:, :-1]), bias: np.float32(matched.means[:, -1]), above: placed}
        known |= {weight, bias}
    after = run(algorithm, task, n_rounds=3, clients=4)
    final = algorithm.final(after.server)
    assert len(final["1.bias"]) > 9
    assert relative_error(final, models[0]) < 1e-5
    wider = MLP(hidden=(len(final["1.bias"]), len(final["3.bias"])))
    assert task.model.evaluate(final, {}, task.data, "test") == wider.evaluate(final, {}, task.data, "test")


def _bounds(task: Task) -> tuple[Any, Any]:
    return task.data.indptr[:-1], task.data.indptr[1:]


@pytest.mark.parametrize("model", ["mlp", "cnn", "lstm"])
def test_units_by_index_without_training_again_are_a_round_of_fedavg(model: str) -> None:
    task = task_of(model, epochs=2)
    algorithm = FedMA(initial="same", matching=BY_INDEX, head="examples", retrain_epochs=0)
    n_layers = {"mlp": 3, "cnn": 4, "lstm": 3}[model]
    after, wanted = run(algorithm, task, n_rounds=n_layers, clients=4), run(FedAvg(), task, clients=4)
    assert relative_error(algorithm.final(after.server), wanted.server) < 1e-5
    own_headers = (n_layers - 1) * len(COUNTS) * (dense_wire_bits(1000) - 32000)
    assert after.uplink_bits == pytest.approx(wanted.uplink_bits, abs=2 * own_headers)


@pytest.mark.parametrize("model", ["mlp", "cnn", "lstm"])
def test_a_second_pass_starts_from_each_clients_units(model: str) -> None:
    task, algorithm = task_of(model, epochs=1), FedMA()
    n_layers = {"mlp": 3, "cnn": 4, "lstm": 3}[model]
    every = outcomes(algorithm, task, n_layers + 1)
    server = server_after(every[n_layers - 1])
    hidden = MatchingState.of(server, algorithm._hidden(task)).hidden
    final, own = algorithm.final(server), hidden.counts
    grown = hidden.counts_in(final)
    assert all(whole >= mine for whole, mine in zip(grown, own, strict=True))
    assert grown != own
    progress = MatchingState.of(server, hidden)
    assert (progress.layer, progress.passes) == (0, 1)
    broadcast = algorithm.broadcast(server, task, n_layers + 1).arrays
    state = {name: values[EVERYONE] for name, values in algorithm.init_clients(task).items()}
    (call,) = algorithm.local_calls(broadcast, Chunk(n_layers + 1, 0, EVERYONE, state), task)
    assert call.terms.start is not None
    for client in EVERYONE.tolist():
        units = tuple(each[client] for each in progress.units)
        wanted = hidden.resized(grown).take(final, units)
        assert all(np.array_equal(call.terms.start[name][client], values) for name, values in wanted.items())
    assert np.isfinite(every[-1].record.loss)


def test_what_is_sent_in_each_round() -> None:
    task, algorithm = task_of(), FedMA()
    every = outcomes(algorithm, task, 4)
    shapes = [{name: values.shape for name, values in server_after(each).items()} for each in every]
    first, second = shapes[0]["matching/layers/1.bias"][0], shapes[1]["matching/layers/3.bias"][0]
    up = [9 * 65, 6 * (first + 1), 10 * (second + 1) + 10, 9 * 65]
    down = [0, first * 65 + 9, second * (first + 1) + 6, 10 * 7]
    for each, upload, download in zip(every, up, down, strict=True):
        assert each.ledger.uplink_bits.tolist() == [DensePayload(np.zeros(upload, np.float32)).wire_bits()] * 4
        assert each.ledger.downlink_bits.tolist() == [DensePayload(np.zeros(download, np.float32)).wire_bits()] * 4
    again = algorithm.broadcast(server_after(every[2]), task, 4)
    recipients = Recipients(EVERYONE, np.array([3, 2, 0, 3]), 4)
    bits = algorithm.download_bits(server_after(every[2]), again, task, recipients)
    own = dense_wire_bits(sum(values.size for values in task.initial_parameters().values()))
    assert bits.tolist() == [dense_wire_bits(70), own, own, dense_wire_bits(70)]
    same = FedMA(initial="same")
    assert (outcomes(same, task, 1)[0].ledger.downlink_bits == own).all()


def test_no_training_again_sends_the_permuted_layers_as_they_are() -> None:
    task = task_of(epochs=2)
    once, matched = outcomes(FedMA(), task, 1)[0], outcomes(FedMA(retrain_epochs=0), task, 3)
    assert once.state is not None
    assert matched[-1].state is not None
    for name in ("own/3.weight", "own/5.bias"):
        assert np.array_equal(once.state.clients[name], matched[-1].state.clients[name])
    assert [each.ledger.examples.sum() > 0 for each in matched] == [True, False, False]


class Losing(Executor):
    """Loses one client's upload in one round."""

    def __init__(self, executor: Any, round_index: int, client: int) -> None:
        self.executor, self.round_index, self.client = executor, round_index, client

    def train(self, broadcast: Arrays, chunks: Any) -> Any:
        lost = [
            replace(each, lost=(each.clients == self.client) & (each.round_index == self.round_index))
            for each in chunks
        ]
        return self.executor.train(broadcast, lost)


def test_a_client_whose_upload_is_lost_sits_out_until_the_next_pass() -> None:
    task, algorithm = task_of(), FedMA()
    plan = Plan(rounds=6, clients_per_round=4, chunk_size=3, checkpoint_every=1)
    every = list(rounds(Run(plan, algorithm, task), Losing(local(algorithm, task), 1, 2)))
    assert [each.ledger.delivered.tolist() for each in every] == [
        [True, True, False, True],
        *[[True, True, False, True]] * 2,
        *[[True] * 4] * 3,
    ]
    header = dense_wire_bits(0)
    assert [(each.ledger.uplink_bits[2], each.ledger.downlink_bits[2] == header) for each in every[1:3]] == [
        (0, True),
        (0, True),
    ]
    assert (every[1].ledger.examples[2], every[3].ledger.examples[2]) == (0, COUNTS[2])
    three = FedMA()._hidden(task)
    progress = MatchingState.of(server_after(every[2]), three)
    assert all((units[2] == -1).all() and (units[[0, 1, 3]] >= 0).all() for units in progress.units)
    first = progress.slice_of(algorithm.final(server_after(every[2])), 2)
    assert np.array_equal(first["1.bias"], algorithm.final(server_after(every[2]))["1.bias"][:9])


def test_a_layer_that_nobody_delivers_is_asked_for_again() -> None:
    task, algorithm = task_of(), FedMA()
    server = algorithm.init(task)
    broadcast = algorithm.broadcast(server, task, 1).arrays
    state = {name: values[EVERYONE] for name, values in algorithm.init_clients(task).items()}
    chunk = Chunk(1, 0, EVERYONE, state, lost=np.ones(4, dtype=bool))
    result = algorithm.train(broadcast, chunk, task)
    after = algorithm.step(server, broadcast, algorithm.fold([result.partial]), task, 1)
    assert all(np.array_equal(after[name], values) for name, values in server.items())
    assert all(values.any() for name, values in OWN.of(result.state).items() if name not in ("1.weight", "1.bias"))


def test_the_last_layer_may_have_epochs_and_a_rate_of_its_own() -> None:
    task = task_of(epochs=2)
    algorithm = FedMA(retrain_epochs=1, head_epochs=3, head_rate=0.1)
    every = outcomes(algorithm, task, 3)
    assert [int(each.ledger.examples[0]) for each in every] == [42, 21, 63]
    server = server_after(every[1])
    state = every[1].state
    assert state is not None
    chunk = Chunk(3, 0, EVERYONE, state.clients)
    (call,) = algorithm.local_calls(algorithm.broadcast(server, task, 3).arrays, chunk, task)
    assert call.task.training.learning_rate == pytest.approx(0.01)


# Bad input


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.codec=[quantise]"], "algorithm.codec has quantise, but clients of fedma send whole layers"),
        (["algorithm.rank=3"], "algorithm.rank is unknown; known here: "),
        (["schedule=buffered"], "schedule = buffered: fedma as set here cannot count stale updates less"),
        (["model=softmax"], "model.kind = softmax declares no hidden units to match; use mlp, cnn, vgg9 or char_lstm"),
        (["model={kind: mlp, hidden: []}"], "model.kind = mlp has no hidden layer; give it one"),
        (["secure={kind: masked}"], "secure: fedma on mlp needs more than the weighted sum"),
        (["data=diabetes", "model=mlp"], "algorithm.head = classes: the targets of diabetes are numbers, not classes"),
        (["algorithm.matching.gamma=0"], "algorithm.matching.gamma = 0: "),
        (["algorithm.matching.units=all"], "algorithm.matching.units = 'all'"),
        (["sampling=uniform", "replacement=true"], "replacement = true: fedma as set here counts every client once"),
    ],
)
def test_it_refuses(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as raised:
        experiment = load_experiment("fedavg-digits", ["algorithm=fedma", *overrides])
        experiment.task(experiment.data_source.load())
    assert words in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_it_refuses_layers_that_cannot_be_matched() -> None:
    deep = make_task(windows(np.array(COUNTS)), CharLSTM(embedding_dim=3, hidden=5, layers=2))
    with pytest.raises(UserError, match=r"model\.layers = 2: matched layers differ in width"):
        FedMA().check(deep)
    task = task_of()
    with pytest.raises(UserError, match=r"start_from gives all clients one model; set algorithm\.initial = same"):
        FedMA().check(replace(task, start=task.initial_parameters()))
    FedMA(initial="same").check(replace(task, start=task.initial_parameters()))
