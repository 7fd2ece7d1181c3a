"""Local training of networks: batched, client after client, and in a plain loop, clients take the same steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from digits import digits, make_task, plain_client, relative_error, train
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedprox import FedProx
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.algorithms.local_training.gradients import batched_forward, chain_gradient, gains_from_batching
from narrowcast.platform.data.samples import Labelled
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import CNN, MLP, VGG9, CharLSTM, Softmax, TorchModule
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.seeds import stream_keys
from narrowcast.platform.types import Chunk, LocalTerms

COUNTS = [21, 8, 40, 3, 17, 8, 0, 30]
TRAININGS: list[dict[str, Any]] = [
    {},
    {"epochs": 3},
    {"momentum": 0.9, "epochs": 2},
    {"weight_decay": 0.05, "epochs": 2},
    {"clip_norm": 0.3, "epochs": 2},
    {"momentum": 0.5, "weight_decay": 0.01, "clip_norm": 1.0, "epochs": 2},
]


def with_bias_free_layer(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width, bias=False), nn.Tanh(), nn.Linear(width, 10))


def with_one_activation_twice() -> nn.Module:
    activation = nn.Sigmoid()
    return nn.Sequential(nn.Linear(64, 9), activation, nn.Linear(9, 8), activation, nn.Linear(8, 10))


def with_tied_layers() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(nn.Linear(64, 8), nn.ReLU(), layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(8, 10))


def with_layer_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 10))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))


class Branches(nn.Module):
    """Its control flow depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 10)
        self.second = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) if x.mean() > 0.3 else self.second(x)


HERE = "test_network"
MODELS: list[NeuralNetwork] = [
    Softmax(),
    MLP(hidden=(16,)),
    MLP(hidden=(16, 8)),
    TorchModule(factory=f"{HERE}:with_bias_free_layer", arguments={"width": 7}),
    TorchModule(factory=f"{HERE}:with_one_activation_twice"),
    TorchModule(factory=f"{HERE}:with_layer_norm"),
]
CHAINS = MODELS[:5]


@pytest.mark.parametrize("execution", ["batched", "per_client"])
@pytest.mark.parametrize("training", TRAININGS, ids=lambda each: "-".join(each) or "plain")
@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_every_client_takes_the_steps_of_a_plain_loop(execution: str, training: dict[str, Any], mu: float) -> None:
    task = make_task(digits(COUNTS), execution=execution, **training)
    server = task.model.init_server(task.data, 0)
    chunk = Chunk(1, 0, np.arange(len(COUNTS)), {})
    updates = task.training.train(server, chunk, task, LocalTerms(proximal=mu))
    for client, count in enumerate(COUNTS):
        if count:
            change = {name: values[client] for name, values in updates.changes.items()}
            wanted = plain_client(task, server, client, mu=mu)
            assert relative_error(change, {name: wanted[name] - server[name] for name in wanted}) <= 2e-5
        else:
            assert not any(values[client].any() for values in updates.changes.values())
    epochs = task.training.epochs
    assert updates.examples.tolist() == [count * epochs for count in COUNTS]
    assert updates.steps.tolist() == [-(-count // 8) * epochs for count in COUNTS]


@pytest.mark.parametrize("model", MODELS, ids=lambda each: each.kind)
def test_batched_equals_client_after_client(model: NeuralNetwork) -> None:
    task = make_task(digits(COUNTS), model, epochs=2)
    server = model.init_server(task.data, 0)
    chunk = Chunk(1, 0, np.arange(len(COUNTS)), {})
    batched, alone = (
        make_task(task.data, model, epochs=2, execution=execution).training.train(server, chunk, task, LocalTerms())
        for execution in ("batched", "per_client")
    )
    assert relative_error(batched.changes, alone.changes) <= 1e-5
    assert np.allclose(batched.loss, alone.loss, rtol=1e-5)


def test_convolutions_run_client_after_client_unless_told() -> None:
    data = digits(COUNTS, images=True)
    model = CNN(channels=(4, 8), hidden=16)
    automatic, batched = make_task(data, model), make_task(data, model, execution="batched")
    assert [task.training.mode(task) for task in (automatic, batched)] == ["per_client", "batched"]
    server, chunk = model.init_server(data, 0), Chunk(1, 0, np.arange(len(COUNTS)), {})
    alone, together = (task.training.train(server, chunk, task, LocalTerms()) for task in (automatic, batched))
    assert relative_error(together.changes, alone.changes) <= 1e-4


@pytest.mark.parametrize("model", CHAINS, ids=lambda each: each.kind)
def test_a_chain_needs_no_vmap_and_gives_what_the_module_gives(model: NeuralNetwork) -> None:
    module = model.module(digits(COUNTS))
    assert gains_from_batching(module)
    features = torch.rand(3, 5, 64)
    parameters = {name: torch.randn(3, *values.shape) for name, values in module.named_parameters()}
    together = batched_forward(module)(parameters, features)
    for client in range(3):
        alone = torch.func.functional_call(
            module, {name: values[client] for name, values in parameters.items()}, (features[client],)
        )
        assert torch.allclose(together[client], alone, atol=1e-5)


@pytest.mark.parametrize("model", CHAINS, ids=lambda each: each.kind)
def test_the_closed_form_of_a_chain_is_the_gradient_of_autograd(model: NeuralNetwork) -> None:
    for clients, batch in ((1, 1), (3, 5), (20, 10), (7, 32)):
        assert_gradient_of_autograd(model.module(digits(COUNTS)), clients, batch, classes=10)


@pytest.mark.parametrize("classes", [2, 15, 16, 40])
def test_the_closed_form_of_the_cross_entropy_is_stable_for_any_number_of_classes(classes: int) -> None:
    for scale in (1.0, 1000.0):
        assert_gradient_of_autograd(nn.Sequential(nn.Linear(64, classes)), 7, 32, classes, scale)


def assert_gradient_of_autograd(module: nn.Module, clients: int, batch: int, classes: int, scale: float = 1.0) -> None:
    gradient = chain_gradient(module)
    assert gradient is not None
    torch.manual_seed(clients)
    features, labels = torch.rand(clients, batch, 64), torch.randint(classes, (clients, batch))
    sizes = torch.randint(1, batch + 1, (clients, 1))
    weights = (torch.arange(batch) < sizes) / sizes
    parameters = {
        name: (scale * torch.randn(clients, *values.shape)).requires_grad_()
        for name, values in module.named_parameters()
    }
    scores = batched_forward(module)(parameters, features)
    expected = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
    wanted = torch.autograd.grad((expected.view(labels.shape) * weights).sum(), list(parameters.values()))
    with torch.no_grad():
        got, entropies = gradient(parameters, features, labels, weights)
    assert list(got) == list(parameters)
    torch.testing.assert_close(list(got.values()), list(wanted))
    assert all(each.is_contiguous() for each in got.values())
    torch.testing.assert_close(entropies.flatten(), expected)


def test_layers_that_share_parameters_are_trained_client_after_client() -> None:
    task = make_task(digits(COUNTS), TorchModule(factory=f"{HERE}:with_tied_layers"))
    assert task.training.mode(task) == "per_client"
    assert chain_gradient(with_tied_layers()) is None


@pytest.mark.parametrize(
    ("model", "execution", "message"),
    [
        (TorchModule(factory=f"{HERE}:with_batch_norm"), "auto", "group norm"),
        (TorchModule(factory=f"{HERE}:Branches"), "batched", "use per_client"),
        (TorchModule(factory=f"{HERE}:digits", arguments={"counts": [1]}), "auto", "must return a torch.nn.Module"),
        (CNN(), "auto", r"needs \[channels, height, width\]"),
        (CharLSTM(), "auto", "does not take the features"),
    ],
    ids=["batch norm", "control flow", "no module", "vectors", "floats"],
)
def test_a_model_that_cannot_be_trained_is_refused(model: NeuralNetwork, execution: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_task(digits(COUNTS), model, execution=execution)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("factory", "message"),
    [(f"{HERE}:nothing", f"{HERE} .* has no nothing"), ("no_such_package:make", "no_such_package")],
)
def test_a_factory_that_does_not_exist_is_refused(factory: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TorchModule(factory=factory)


def test_control_flow_that_depends_on_data_is_trained_client_after_client() -> None:
    task = make_task(digits(COUNTS), TorchModule(factory=f"{HERE}:Branches"))
    (result,) = train(FedAvg(), task)
    assert result.ledger.delivered.tolist() == [count > 0 for count in COUNTS]


def test_a_deep_network_and_a_recurrent_one_train() -> None:
    random = np.random.default_rng(0)
    data = digits([4, 6])
    colour = data.__class__(**{**vars_of(data), "train": data.train.__class__(
        random.integers(0, 256, (1400, 3, 32, 32), dtype=np.uint8), data.train.labels)})  # fmt: skip
    text = data.__class__(**{**vars_of(data), "train": data.train.__class__(
        random.integers(0, 10, (1400, 12)), data.train.labels)})  # fmt: skip
    for drawn, model in ((colour, VGG9()), (text, CharLSTM(hidden=16))):
        samples = drawn.__class__(**{**vars_of(drawn), "test": drawn.train.take(np.arange(2))})
        (result,) = train(FedAvg(), make_task(samples, model))
        assert result.ledger.delivered.all()
        assert np.isfinite(result.ledger.loss).all()


@pytest.mark.parametrize(("first_weights", "gain"), [("torch", 1 / 3), ("he", 2.0)])
def test_the_first_weights_of_vgg9_have_the_variance_of_their_kind(first_weights: Any, gain: float) -> None:
    random = np.random.default_rng(0)
    images = Labelled(random.integers(0, 256, (10, 3, 32, 32), dtype=np.uint8), np.arange(10))
    data = replace(digits([4, 6]), train=images)
    for name, values in VGG9(first_weights=first_weights).init_server(data, 3).items():
        if name.endswith("weight"):
            inputs = np.prod(values.shape[1:])
            assert values.var() * inputs == pytest.approx(gain, rel=0.15), name


def vars_of(data: Any) -> dict[str, Any]:
    return {name: getattr(data, name) for name in data.__dataclass_fields__}


def test_a_client_that_diverges_is_dropped_and_leaves_the_others_alone() -> None:
    data = digits(COUNTS)
    spoiled = data.train.features.copy()
    spoiled[data.order[: COUNTS[0]]] = np.nan  # the samples of client 0 alone
    bad = data.__class__(**{**vars_of(data), "train": data.train.__class__(spoiled, data.train.labels)})
    (good_result,), (bad_result,) = train(FedAvg(), make_task(data)), train(FedAvg(), make_task(bad))
    assert bad_result.ledger.delivered.tolist() == [False, *(count > 0 for count in COUNTS[1:])]
    assert np.array_equal(bad_result.ledger.loss[1:], good_result.ledger.loss[1:])
    assert all(np.isfinite(values).all() for values in bad_result.partial.values())
    assert float(bad_result.partial["weight"]) == sum(COUNTS[1:])
    assert bad_result.ledger.uplink_bits[0] > 0  # it did upload, in vain
    assert bad_result.ledger.uplink_bits[6] == 0  # it has no data


def test_partial_work_is_drawn_between_one_and_all_epochs() -> None:
    task = make_task(digits([16] * 60), epochs=5)
    terms = FedProx(partial_share=0.5).terms(Chunk(3, 0, np.arange(60), {}), task)
    assert terms.epochs is not None
    assert set(terms.epochs.tolist()) <= {1, 2, 3, 4, 5}
    assert 15 <= (terms.epochs < 5).sum() <= 35
    assert FedProx().terms(Chunk(3, 0, np.arange(60), {}), task).epochs is None
    updates = task.training.train(task.model.init_server(task.data, 0), Chunk(3, 0, np.arange(60), {}), task, terms)
    assert updates.steps.tolist() == [2 * epochs for epochs in terms.epochs]


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_a_schedule_visits_every_sample_once_an_epoch(batch_size: int) -> None:
    counts, epochs = np.array([5, 0, 12, 1]), np.array([2, 3, 1, 4])
    schedule = draw_schedule(counts, epochs, batch_size, stream_keys(0, "shuffle", 1, np.arange(4)))
    seen = np.bincount(schedule.samples[schedule.valid], minlength=18)
    assert seen.tolist() == np.repeat(epochs[schedule.order], counts[schedule.order]).tolist()
    assert (np.diff(schedule.steps) <= 0).all()
    assert schedule.active.sum() == schedule.steps.sum() == len(schedule.sizes)
    assert schedule.sizes.sum() == (counts * epochs).sum()


def test_a_batch_larger_than_every_client_is_not_padded() -> None:
    tensors = []
    for batch_size in (max(COUNTS), 10**9):
        task = make_task(digits(COUNTS), MLP(hidden=(4,)), batch_size=batch_size)
        tensors.append(train(FedAvg(), task)[0].partial)
    assert all(np.array_equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


@pytest.mark.parametrize("hidden", [(0,), (-3,), (10**9,)])
def test_a_layer_has_at_least_one_unit_and_not_a_billion(hidden: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"should be (greater|less) than or equal"):
        MLP(hidden=hidden)
