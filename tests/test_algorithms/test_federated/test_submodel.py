"""Sub-models: width 1 is FedAvg, slices train as a whole network of which the rest is zero, and entries average."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from digits import digits, make_task, plain_client, relative_error, run, train
from narrowcast.algorithms.client.sums import TensorSum
from narrowcast.algorithms.codecs.messages import DensePayload
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.submodel import Submodel
from narrowcast.algorithms.federated.unit_slices import UnitSlices, multiplications, relative_work
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.experiment import load_experiment
from narrowcast.laws.small_tasks import windows
from narrowcast.platform.contracts import Recipients, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.hidden_units import Units
from narrowcast.platform.models.networks import CNN, MLP, CharLSTM, TorchModule
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Arrays, Chunk
from running import local

COUNTS = [21, 8, 40, 3, 17, 8, 0, 30]
EVERYONE = np.arange(len(COUNTS))
KINDS = ("prefix", "rolling", "random", "disjoint", "important")
WIDTHS = (1.0, 0.5, 0.25)


def task_of(model: str, **training: Any) -> Task:
    if model == "mlp":
        return make_task(digits(COUNTS), MLP(hidden=(16, 12)), **training)
    if model == "cnn":
        return make_task(digits(COUNTS, images=True), CNN(channels=(4, 6), hidden=16), **training)
    return make_task(windows(np.array(COUNTS)), CharLSTM(embedding_dim=3, hidden=8), **training)


def slices_of(algorithm: Submodel, task: Task, round_index: int = 1, model: Arrays | None = None) -> list[Units]:
    slices = UnitSlices(algorithm.slices, algorithm.widths, task.model.hidden_units(task.data))
    sent = task.initial_parameters() if model is None else model
    turns = len(algorithm.widths)
    return slices.of_clients(EVERYONE, lambda clients: clients % turns, sent, task.seed, round_index)


def masks(model: str, units: Units) -> dict[str, np.ndarray]:
    """The entries of a slice by hand, 1 or 0, for each parameter of the models above."""
    sizes = {"mlp": (16, 12), "cnn": (4, 6, 16), "lstm": (8, 8)}[model]
    own = [np.isin(np.arange(size), each).astype(np.float32) for size, each in zip(sizes, units, strict=True)]
    if model == "mlp":
        first, second = own
        return {
            "1.weight": first[:, None], "1.bias": first, "3.weight": np.outer(second, first), "3.bias": second,
            "5.weight": second[None], "5.bias": np.ones(1, np.float32),
        }  # fmt: skip
    if model == "cnn":
        first, second, hidden = own
        return {
            "0.weight": first[:, None, None, None], "0.bias": first,
            "3.weight": np.outer(second, first)[:, :, None, None], "3.bias": second,
            "7.weight": np.outer(hidden, np.repeat(second, 4)), "7.bias": hidden,  # 2 x 2 pixels of each channel
            "9.weight": hidden[None], "9.bias": np.ones(1, np.float32),
        }  # fmt: skip
    first, second = own
    gates, second_gates, every = np.tile(first, 4), np.tile(second, 4), np.ones(1, np.float32)
    return {
        "embedding.weight": every[:, None], "lstm.weight_ih_l0": gates[:, None],
        "lstm.weight_hh_l0": np.outer(gates, first), "lstm.bias_ih_l0": gates, "lstm.bias_hh_l0": gates,
        "lstm.weight_ih_l1": np.outer(second_gates, first), "lstm.weight_hh_l1": np.outer(second_gates, second),
        "lstm.bias_ih_l1": second_gates, "lstm.bias_hh_l1": second_gates, "scores.weight": second[None],
        "scores.bias": every,
    }  # fmt: skip


# Identities


@pytest.mark.parametrize("slices", KINDS)
def test_width_1_is_fedavg_to_the_bit(slices: Any) -> None:
    task = task_of("mlp", epochs=2, momentum=0.5)
    whole, wanted = (
        run(each, task, n_rounds=3, clients=5) for each in (Submodel(widths=(1,), slices=slices), FedAvg())
    )
    assert all(np.array_equal(whole.server[name], values) for name, values in wanted.server.items())
    for name in ("uplink_bits", "downlink_bits", "simulated_seconds"):
        assert getattr(whole, name) == getattr(wanted, name)


@pytest.mark.parametrize("model", ["cnn", "lstm"])
def test_width_1_is_fedavg_for_other_networks(model: str) -> None:
    task = task_of(model)
    whole, wanted = (run(each, task) for each in (Submodel(widths=(1,)), FedAvg()))
    assert all(np.array_equal(whole.server[name], values) for name, values in wanted.server.items())


@pytest.mark.parametrize("weights", ["examples", "equal"])
@pytest.mark.parametrize(
    ("model", "slices"), [*(("mlp", each) for each in KINDS), ("cnn", "random"), ("lstm", "disjoint")]
)
def test_a_round_is_that_of_whole_networks_with_zeros_outside_of_the_slices(
    model: str, slices: Any, weights: Any
) -> None:
    """The slow reference: units of weight 0 give 0 and have no gradient."""
    task = task_of(model, epochs=2, weight_decay=0.01)
    algorithm = Submodel(widths=WIDTHS, slices=slices, weights=weights)
    server = task.initial_parameters()
    total = {name: np.zeros(values.shape) for name, values in server.items()}
    divisor = {name: np.zeros(values.shape) for name, values in server.items()}
    for client, units in enumerate(slices_of(algorithm, task)):
        weight = COUNTS[client] if weights == "examples" else float(COUNTS[client] > 0)
        kept = masks(model, units)
        sliced = {name: values * kept[name] for name, values in server.items()}
        trained = plain_client(task, sliced, client)
        for name in server:
            total[name] += weight * (trained[name] - sliced[name])
            divisor[name] += weight * kept[name]
    wanted = {name: values + total[name] / np.maximum(divisor[name], 1e-9) for name, values in server.items()}
    assert relative_error(run(algorithm, task).server, wanted) < 2e-6


@pytest.mark.parametrize("model", ["mlp", "cnn", "lstm"])
def test_disjoint_slices_merge_exactly(model: str) -> None:
    widths = (0.5, 0.5) if model == "cnn" else (0.5, 0.25, 0.25)
    task, algorithm = task_of(model), Submodel(widths=widths, slices="disjoint", weights="equal")
    clients = EVERYONE[: len(widths)]
    server, broadcast = task.initial_parameters(), algorithm.broadcast(algorithm.init(task), task, 1).arrays
    units, chunk = slices_of(algorithm, task)[: len(widths)], Chunk(1, 0, clients, {})
    for layer, total in enumerate(task.model.hidden_units(task.data).counts):
        assert sorted(np.concatenate([each[layer] for each in units])) == list(range(total))
    trained = task.training.train_together(algorithm.local_calls(broadcast, chunk, task))
    after = algorithm.step(server, broadcast, algorithm.train(broadcast, chunk, task).partial, task, 1)
    sent_by = {name: sum(masks(model, each)[name] for each in units) for name in server}
    for each, updates in zip(units, trained, strict=True):
        places = task.model.hidden_units(task.data)
        for name, change in updates.changes.items():
            index = places.index(name, each)
            alone = np.broadcast_to(sent_by[name], server[name].shape)[index] == 1
            assert np.array_equal(after[name][index][alone], (server[name][index] + change[0])[alone])
    for name, values in server.items():
        nobody = np.broadcast_to(sent_by[name], values.shape) == 0
        assert np.array_equal(after[name][nobody], values[nobody])
    assert any((sent == 0).any() for sent in sent_by.values()), "entries between two slices"


def test_entries_that_nobody_sent_keep_every_bit() -> None:
    server = {"w": np.array([-0.0, 0.0, 1e-45, -3.0], dtype=np.float32)}
    sums = TensorSum({"w": np.array([0, 0, 0, 2], np.float32)}, np.array(1.0), {"w": np.array([0.0, 0, 0, 4])})
    after = Submodel().step(server, server, sums.arrays(), None, 1)["w"]  # type: ignore[arg-type]
    assert after[:3].tobytes() == server["w"][:3].tobytes()
    assert after[3] == -2.5


# Slices


def test_windows_roll_over_all_units_alike() -> None:
    task, algorithm = task_of("mlp"), Submodel(widths=(0.25,), slices="rolling")
    rounds = [slices_of(algorithm, task, each)[0][0] for each in range(1, 17)]
    assert rounds[0].tolist() == [0, 1, 2, 3]
    assert rounds[14].tolist() == [0, 1, 14, 15]
    assert np.bincount(np.concatenate(rounds)).tolist() == [4] * 16


@pytest.mark.parametrize("slices", ["prefix", "rolling", "important"])
def test_wide_slices_contain_narrow_ones(slices: Any) -> None:
    task = task_of("cnn")
    wide, middle, narrow = slices_of(Submodel(widths=WIDTHS, slices=slices), task, 5)[:3]
    for layer, total in enumerate((4, 6, 16)):
        assert set(narrow[layer]) < set(middle[layer]) < set(wide[layer]) == set(range(total))


def test_important_units_have_the_largest_weights() -> None:
    task, algorithm = task_of("mlp"), Submodel(widths=(0.25,), slices="important")
    model = {name: np.zeros_like(values) for name, values in task.initial_parameters().items()}
    model["1.weight"][7, 3], model["1.bias"][2], model["3.weight"][0, 11] = -5.0, 4.0, 3.0
    first, second = slices_of(algorithm, task, 1, model)[0]
    assert first.tolist() == [0, 2, 7, 11]
    assert second.tolist() == [0, 1, 2]


def test_drawn_units_and_circles_change_with_the_round() -> None:
    task = task_of("mlp")
    for slices in ("random", "disjoint"):
        algorithm = Submodel(widths=(0.25,), slices=slices)
        first, second = (slices_of(algorithm, task, each) for each in (1, 2))
        assert any(not np.array_equal(one[0], other[0]) for one, other in zip(first, second, strict=True))
        assert not np.array_equal(first[0][0], first[1][0])


def test_arcs_that_do_not_fit_on_a_circle_cover_it_evenly() -> None:
    units = slices_of(Submodel(widths=(0.5,), slices="disjoint"), task_of("mlp"))
    assert np.bincount(np.concatenate([each[0] for each in units])).tolist() == [4] * 16


# Sizes and time


@pytest.mark.parametrize("model", ["mlp", "cnn", "lstm"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_clients_pay_for_the_bytes_of_their_slice(model: str, dtype: Any) -> None:
    task = task_of(model)
    task = replace(task, model=task.model.model_copy(update={"dtype": dtype}))
    algorithm = Submodel(widths=WIDTHS, slices="disjoint")
    server = algorithm.init(task)
    sent = algorithm.broadcast(server, task, 1)
    down = algorithm.download_bits(server, sent, task, Recipients(EVERYONE, 0 * EVERYONE, 1))
    hidden = task.model.hidden_units(task.data)
    for client, units in enumerate(slices_of(algorithm, task)):
        assert down[client] == 8 * len(DensePayload.of(hidden.take(server, units)).to_bytes())
    (result,) = train(algorithm, task)
    assert result.ledger.uplink_bits.tolist() == np.where(np.array(COUNTS) > 0, down, 0).tolist()
    assert sent.full.wire_bits() == down[0]


def test_the_work_of_a_slice_is_its_share_of_the_multiplications() -> None:
    mlp, cnn, lstm = (task_of(each) for each in ("mlp", "cnn", "lstm"))
    assert relative_work(mlp.model, (1.0, 0.5), mlp.data) == pytest.approx(
        [1.0, (64 * 8 + 8 * 6 + 6 * 10) / (64 * 16 + 16 * 12 + 12 * 10)]
    )
    whole, half = (
        64 * 25 * first + 16 * 25 * first * second + 4 * second * hidden + 10 * hidden
        for first, second, hidden in ((4, 6, 16), (2, 3, 8))
    )
    assert relative_work(cnn.model, (0.5,), cnn.data) == pytest.approx([half / whole])
    whole, half = (
        length * (4 * units * (3 + units) + 4 * units * 2 * units) + 7 * units
        for length in (lstm.data.train.features.shape[1],)
        for units in (8, 4)
    )
    assert relative_work(lstm.model, (0.5,), lstm.data) == pytest.approx([half / whole])


def attention() -> nn.Module:
    """Attention of two heads over the eight rows of a digit, as eight tokens of width 8."""
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (8, 8)), layer, nn.Flatten(), nn.Linear(64, 10))


def test_the_multiplications_of_attention_count() -> None:
    tokens, width, wide = 8, 8, 16
    projections, scores_and_means = 4 * tokens * width**2, 2 * tokens**2 * width
    expected = projections + scores_and_means + 2 * tokens * width * wide + tokens * width * 10
    model = TorchModule(factory="test_submodel:attention")
    assert multiplications(model, digits(COUNTS)) == 2 * expected


@pytest.mark.parametrize("schedule", ["synchronous", "{kind: buffered, concurrency: 50, buffer_size: 50}"])
def test_narrow_slices_take_less_time(schedule: str) -> None:
    settings = ["rounds=1", "clients_per_round=50", "clock.seconds_per_example=100", f"schedule={schedule}"]
    settings += ["clock.compute_overhead_seconds=0"]
    seconds = {}
    for width in (1, 0.5):
        each = load_experiment("fedavg-digits", [*settings, f"algorithm={{kind: submodel, widths: [{width}]}}"])
        task = each.task(each.data.load())
        (outcome,) = rounds(Run(each, each.algorithm, task), local(each.algorithm, task))
        seconds[width] = outcome.record.simulated_seconds
    assert seconds[0.5] == pytest.approx(seconds[1] / 2, rel=1e-3)  # beside which the links hardly count


def with_profiles(task: Task, **columns: list[float]) -> Task:
    return replace(task, profiles=replace(task.profiles, **{name: np.array(each) for name, each in columns.items()}))


def sizes(algorithm: Submodel, task: Task, round_index: int = 1) -> list[int]:
    """The bits of each client's download."""
    sent = algorithm.broadcast(algorithm.init(task), task, round_index)
    recipients = Recipients(EVERYONE, 0 * EVERYONE, round_index)
    return algorithm.download_bits(sent.arrays, sent, task, recipients).tolist()


def test_clients_take_the_widest_slice_that_their_device_or_link_affords() -> None:
    task = task_of("mlp")
    whole, half, quarter = sizes(Submodel(widths=WIDTHS), task)[:3]
    work = relative_work(task.model, WIDTHS, task.data).tolist()
    speeds = [1.0, 0.99, work[1], work[1] - 1e-6, work[2], 1e-3, 7.0, 1.0]
    by_speed = sizes(Submodel(widths=WIDTHS, assignment="compute"), with_profiles(task, compute_speed=speeds))
    assert by_speed == [whole, half, half, quarter, quarter, quarter, whole, whole]
    rates = [whole / 2, whole / 2 - 1, half / 2, half / 2 - 1, 1.0, 1e9, quarter, half]
    algorithm = Submodel(widths=WIDTHS[::-1], assignment="link", upload_seconds=2.0)
    by_link = sizes(algorithm, with_profiles(task, uplink_bits_per_second=rates))
    assert by_link == [whole, half, half, quarter, quarter, whole, quarter if 2 * quarter < half else half, half]


def test_widths_that_are_drawn_change_with_the_round_and_are_those_of_the_uploads() -> None:
    task, algorithm = task_of("mlp"), Submodel(widths=WIDTHS, assignment="draw", slices="disjoint")
    assert sizes(algorithm, task, 1) != sizes(algorithm, task, 2)
    broadcast = algorithm.broadcast(algorithm.init(task), task, 2).arrays
    ledger = algorithm.train(broadcast, Chunk(2, 0, EVERYONE, {}), task).ledger
    assert ledger.uplink_bits.tolist() == np.where(np.array(COUNTS) > 0, sizes(algorithm, task, 2), 0).tolist()


# HeteroFL's scaler and masked labels


class Scaled(nn.Module):
    def __init__(self, module: nn.Sequential, rate: float, absent: torch.Tensor) -> None:
        super().__init__()
        self.layers, self.rate, self.absent = module, rate, absent

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            features = layer(features)
            if isinstance(layer, nn.Linear | nn.Conv2d) and layer is not self.layers[-1]:
                features = features / self.rate
        return features.masked_fill(self.absent, 0)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_scaler_and_masked_labels_are_those_of_a_module_written_out(model: str) -> None:
    task = task_of(model, epochs=2)
    algorithm = Submodel(widths=(0.5,), weights="equal", scaler=True, masked_labels=True)
    server, data = task.initial_parameters(), task.data
    places, (units, *_) = task.model.hidden_units(data), slices_of(algorithm, task)
    narrow = task.model.narrowed([len(each) for each in units])
    last = places.outputs[0]
    total = {name: np.zeros(values.shape) for name, values in server.items()}
    count = {name: np.zeros(values.shape) for name, values in server.items()}
    for client in np.flatnonzero(COUNTS):
        own = data.order[data.indptr[client] : data.indptr[client + 1]]
        present = np.isin(np.arange(10), data.train.labels[own])
        start = places.take(server, units)
        module = narrow.module(data)
        module.load_state_dict({name: torch.from_numpy(values) for name, values in start.items()})
        written_out = Scaled(module, 0.5, torch.from_numpy(~present))
        stepped = trained_by_torch(task, written_out, client)
        for name, values in start.items():
            rows = present.reshape(-1, *[1] * (values.ndim - 1)) if name in places.outputs else 1
            total[name][places.index(name, units)] += rows * (stepped[f"layers.{name}"] - values)
            count[name][places.index(name, units)] += rows
    wanted = {name: values + total[name] / np.maximum(count[name], 1) for name, values in server.items()}
    assert (count[last] == 0).any() and (count[last] > 1).any()
    assert relative_error(run(algorithm, task).server, wanted) < 2e-6


def trained_by_torch(task: Task, module: nn.Module, client: int) -> dict[str, np.ndarray]:
    one, training = np.array([client]), task.training
    keys = task.private_seed.stream_keys("shuffle", 1, one)
    schedule = draw_schedule(task.data.examples[one], np.array([training.epochs]), training.batch_size, keys)
    own = task.data.order[task.data.indptr[client] : task.data.indptr[client + 1]]
    optimiser = torch.optim.SGD(module.parameters(), training.learning_rate)
    for batch, size in zip(schedule.samples, schedule.sizes, strict=True):
        picked = task.data.train.take(own[batch[:size]])
        optimiser.zero_grad()
        scores = module(torch.from_numpy(picked.features))
        nn.functional.cross_entropy(scores, torch.from_numpy(picked.labels)).backward()
        optimiser.step()
    return {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}


# What goes together


def test_buffered_steps_of_equal_clients_are_synchronous_rounds() -> None:
    settings = ["rounds=3", "clients_per_round=50", "chunk_size=50", "evaluate_every=3", "clock.compute_slowdown=0"]
    settings += ["fleet=tiers", "algorithm={kind: submodel, widths: [0.5], slices: rolling}"]
    models = []
    for schedule in ("synchronous", "{kind: buffered, concurrency: 50, buffer_size: 50}"):
        each = load_experiment("fedavg-digits", [*settings, f"schedule={schedule}"])
        task = each.task(each.data.load())
        state = list(rounds(Run(each, each.algorithm, task), local(each.algorithm, task)))[-1].state
        assert state is not None
        models.append(state.server)
    assert all(np.array_equal(values, models[0][name]) for name, values in models[1].items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("algorithm.widths=[0.5, 0.01]",), "algorithm.widths = 0.01 leaves no unit of a hidden layer of 64"),
        (("algorithm.widths=[1.5]",), "algorithm.widths"),
        (("algorithm.widths=[]",), "algorithm.widths"),
        (("model=softmax",), "softmax declares no hidden units to slice; use mlp, cnn, vgg9, char_lstm or gcn"),
        (("model={kind: mlp, hidden: []}",), "model.kind = mlp has no hidden layer"),
        (("algorithm.codec=[error_feedback, {kind: top_k, fraction: 0.1}]",), "error_feedback, which keeps state"),
        (("algorithm.assignment=link",), "assignment = link goes with upload_seconds"),
        (("algorithm.upload_seconds=1",), "assignment = link goes with upload_seconds"),
        (("secure=plain",), "submodel on mlp needs more than the weighted sum"),
        (("radio={downlink: broadcast}", "algorithm.slices=disjoint"), "sends each its own part of the model"),
        (("data=diabetes", "algorithm.masked_labels=true"), "the targets of diabetes are numbers, not classes"),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_what_makes_no_sense_is_refused_in_one_line(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as error:
        each = load_experiment("fedavg-digits", ["algorithm=submodel", *settings])
        each.task(each.data.load())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_gates_have_no_scaler() -> None:
    with pytest.raises(UserError, match="char_lstm have gates"):
        Submodel(scaler=True, widths=(0.5,)).check(task_of("lstm"))


def test_one_transmission_serves_nested_slices() -> None:
    each = load_experiment("fedavg-digits", ["algorithm=submodel", "radio={downlink: broadcast}"])
    each.task(each.data.load())
