"""Adapters: outputs begin as the base's, merged weights give the same outputs, and factors alone are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch
from torch import Tensor, nn

from command_line import narrowcast
from digits import digits, make_task, relative_error, run
from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.partial import Partial
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.adapters import Adapters
from narrowcast.platform.models.factorisation import MatrixFactorisation
from narrowcast.platform.models.networks import CNN, MLP, TorchModule
from narrowcast.platform.models.neural_network import as_inputs, skeleton

pytestmark = pytest.mark.filterwarnings(
    "ignore:The ``noload`` loader strategy:DeprecationWarning",  # MLflow's SQL store
    "ignore::sqlalchemy.exc.SADeprecationWarning",
)
DATA = digits([40, 33, 20])
BASE = MLP(hidden=(16,))


def base_with(values: dict[str, Any], features: Any, base: Any = BASE) -> np.ndarray:
    """The outputs of the base with these tensors."""
    module = base.of_seed(0).typed_module(DATA)
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in values.items()})
    with torch.no_grad():
        return module.eval()(as_inputs(features, torch.float32)).numpy()


def outputs_of(model: Adapters, parameters: Any) -> np.ndarray:
    with torch.no_grad():
        return model.loaded(parameters, DATA)(torch.from_numpy(DATA.test.features)).numpy()


def drawn(model: Adapters) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {name: values.shape for name, values in model.init_server(DATA, 0).items()}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("fields", "shapes"),
    [
        ({}, {"1.lora_A": (3, 64), "1.lora_B": (16, 3), "3.lora_A": (3, 16), "3.lora_B": (10, 3)}),
        ({"factor": "b"}, {"1.lora_B": (16, 3), "3.lora_B": (10, 3)}),
        ({"factor": "a"}, {"1.lora_A": (3, 64), "3.lora_A": (3, 16)}),
        ({"factor": "core"}, {"1.lora_core": (3, 3), "3.lora_core": (3, 3)}),
        ({"targets": ["1.*t"], "rank": 40}, {"1.lora_A": (16, 64), "1.lora_B": (16, 16)}),
        (
            {"also_trained": ["3.*"]},
            {"1.lora_A": (3, 64), "1.lora_B": (16, 3), "3.weight": (10, 16), "3.bias": (10,)},
        ),
    ],
    ids=str,
)
def test_the_base_is_frozen_and_its_outputs_are_those_before_training(
    fields: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    model = Adapters(**{"base": BASE, "rank": 3, **fields}).of_seed(0)
    model.check(DATA)
    start = model.init_server(DATA, 0)
    assert {name: values.shape for name, values in start.items()} == shapes
    base = BASE.init_server(DATA, 0)
    assert np.array_equal(outputs_of(model, start), base_with(base, DATA.test.features))
    assert all(np.array_equal(values, base[name]) for name, values in model.merged(start, DATA).items())


@pytest.mark.parametrize("fields", [{}, {"factor": "a"}, {"alpha": 2.0, "also_trained": ["*.bias"]}], ids=str)
def test_merged_weights_are_w0_and_s_times_the_product(fields: dict[str, Any]) -> None:
    model = Adapters(base=BASE, rank=3, **fields).of_seed(0)
    learnt, base = drawn(model), BASE.init_server(DATA, 0)
    whole, merged = model.state(learnt, DATA), model.merged(learnt, DATA)
    assert all(np.array_equal(values, merged[name]) for name, values in model.merged(whole, DATA).items())
    assert merged.keys() == base.keys()
    for layer in ("1.", "3."):
        product = whole[f"{layer}lora_B"].astype(np.float64) @ whole[f"{layer}lora_A"].astype(np.float64)
        wanted = base[f"{layer}weight"] + fields.get("alpha", 8.0) / 3 * product
        assert np.abs(merged[f"{layer}weight"] - wanted).max() <= 1e-6 * np.abs(wanted).max()
        assert np.array_equal(merged[f"{layer}bias"], learnt.get(f"{layer}bias", base[f"{layer}bias"]))
    outputs = outputs_of(model, learnt)
    assert np.abs(base_with(merged, DATA.test.features) - outputs).max() <= 1e-6 * np.abs(outputs).max()


def test_the_factors_train_as_in_a_plain_loop_and_are_all_that_is_sent() -> None:
    data = digits([40])
    task = make_task(data, Adapters(base=BASE, rank=64, alpha=4.0), epochs=3)
    start, base = task.initial_parameters(), BASE.init_server(data, 0)
    state = run(FedAvg(), task, n_rounds=1, clients=1)
    factors = {name: torch.from_numpy(values.copy()).requires_grad_() for name, values in start.items()}
    one = np.array([0])
    schedule = draw_schedule(data.examples, np.array([3]), 8, task.private_seed.stream_keys("shuffle", 1, one))
    for batch, size in zip(schedule.samples, schedule.sizes, strict=True):
        samples = data.train.take(data.order[batch[:size]])
        values = torch.from_numpy(samples.features)
        for layer, scale in (("1.", 4 / 16), ("3.", 4 / 10)):
            weight = (
                torch.from_numpy(base[f"{layer}weight"]) + scale * factors[f"{layer}lora_B"] @ factors[f"{layer}lora_A"]
            )
            values = values @ weight.T + torch.from_numpy(base[f"{layer}bias"])
            values = values.relu() if layer == "1." else values
        loss = nn.functional.cross_entropy(values, torch.from_numpy(samples.labels))
        slopes = torch.autograd.grad(loss, list(factors.values()))
        for factor, slope in zip(factors.values(), slopes, strict=True):
            factor.data -= 0.1 * slope
    assert relative_error(state.server, {name: factor.detach().numpy() for name, factor in factors.items()}) < 1e-5
    bits = dense_wire_bits(16 * 64 + 16 * 16 + 10 * 16 + 10 * 10, np.dtype(np.float32))
    assert (state.uplink_bits, state.downlink_bits) == (bits, bits)


def test_clients_at_once_learn_what_they_learn_in_turn_and_keep_one_factor_if_asked() -> None:
    models = []
    for execution in ("batched", "per_client"):
        task = make_task(DATA, Adapters(base=BASE, rank=3), execution=execution)
        models.append(run(FedAvg(), task, n_rounds=2, clients=3).server)
    assert relative_error(*models) < 1e-5
    fedsa = Partial(kept=("*.lora_B",))
    task = make_task(DATA, Adapters(base=BASE, rank=3))
    assert task.training.mode(task) == "batched"
    bits = dense_wire_bits(3 * 64 + 3 * 16, np.dtype(np.float32))
    assert run(fedsa, task, clients=3).uplink_bits == 3 * bits


def test_a_core_learns_the_gradient_between_factors_that_stay() -> None:
    data = digits([40])
    task = make_task(data, Adapters(base=BASE, rank=3, alpha=4.0, factor="core"), batch_size=40)
    learnt = run(FedAvg(), task, clients=1)
    whole, base = task.model.state(learnt.server, data), BASE.init_server(data, 0)
    tensors = {name: torch.from_numpy(values).requires_grad_() for name, values in base.items()}
    samples = data.train.take(data.order)
    features = torch.from_numpy(samples.features)
    hidden = nn.functional.linear(features, tensors["1.weight"], tensors["1.bias"]).relu()
    scores = nn.functional.linear(hidden, tensors["3.weight"], tensors["3.bias"])
    nn.functional.cross_entropy(scores, torch.from_numpy(samples.labels)).backward()
    for layer in ("1.", "3."):
        gradient = tensors[f"{layer}weight"].grad
        assert gradient is not None
        step = -0.1 * 4 / 3 * whole[f"{layer}lora_B"].T @ gradient.numpy() @ whole[f"{layer}lora_A"].T
        assert np.abs(learnt.server[f"{layer}lora_core"] - step).max() < 1e-5 * np.abs(step).max()
        assert np.array_equal(whole[f"{layer}weight"], base[f"{layer}weight"])
    merged, outputs = task.model.merged(learnt.server, data), outputs_of(task.model, learnt.server)
    assert np.abs(base_with(merged, DATA.test.features) - outputs).max() <= 1e-6 * np.abs(outputs).max()
    bits = dense_wire_bits(2 * 3 * 3, np.dtype(np.float32))
    assert (learnt.uplink_bits, learnt.downlink_bits) == (bits, bits)


def test_a_core_begins_as_an_adapter_and_is_written_as_one(tmp_path: Path) -> None:
    both = make_task(DATA, Adapters(base=BASE, rank=3))
    learnt = run(FedAvg(), both, clients=3).server
    first = both.model.write_peft(learnt, DATA, tmp_path / "first")
    cored = make_task(DATA, Adapters(base=BASE, rank=3, factor="core", adapter=str(first)))
    assert np.abs(outputs_of(cored.model, cored.initial_parameters()) - outputs_of(both.model, learnt)).max() < 1e-5
    whole = cored.model.state(cored.initial_parameters(), DATA)
    for layer in ("1.", "3."):
        a, b = whole[f"{layer}lora_A"], whole[f"{layer}lora_B"]
        assert np.abs([a @ a.T - np.eye(3), b.T @ b - np.eye(3)]).max() < 1e-6
        singular = np.linalg.svd(learnt[f"{layer}lora_B"].astype(float) @ learnt[f"{layer}lora_A"])[1][:3]
        assert np.allclose(whole[f"{layer}lora_core"], np.diag(singular), atol=1e-7)
    further = run(FedAvg(), cored, clients=3).server
    last = cored.model.write_peft(further, DATA, tmp_path / "last")
    again = Adapters(base=BASE, rank=3, adapter=str(last)).of_seed(0)
    got, wanted = outputs_of(again, again.init_server(DATA, 0)), outputs_of(cored.model, further)
    assert np.abs(got - wanted).max() < 1e-5
    assert np.abs(wanted - outputs_of(both.model, learnt)).max() > 1e-3


class Tied(nn.Module):
    """Two layers with one weight, and one that it does not use."""

    def __init__(self, *, idle: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.scores = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight = self.first.weight
        if idle:
            self.idle = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.scores(self.second(self.first(values).relu()).relu())


class Encoder(nn.Module):
    """A transformer layer, whose evaluation a fused kernel may do."""

    def __init__(self, *, half: bool = False) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.scores = nn.Linear(8, 10)
        if half:
            self.to(torch.bfloat16)

    def forward(self, values: Tensor) -> Tensor:
        return self.scores(self.layer(values.view(-1, 8, 8)).mean(1))


class Shifted(nn.Sequential):
    """A layer with a table that is made anew and that its file does not have."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 10))
        self.to(torch.bfloat16).register_buffer("table", torch.ones(10, dtype=torch.bfloat16), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) + self.table


def own(name: str, **arguments: Any) -> TorchModule:
    return TorchModule(factory=f"{__name__}:{name}", arguments=arguments)


def test_modules_in_half_types_have_factors_that_are_held_in_float32() -> None:
    task = make_task(DATA, Adapters(base=own("Encoder", half=True), rank=2, targets=["scores.weight"]))
    state = run(FedAvg(), task, n_rounds=2, clients=3)
    assert {values.dtype for values in state.server.values()} == {np.dtype(np.float32)}
    assert not np.array_equal(state.server["scores.lora_B"], task.initial_parameters()["scores.lora_B"])
    assert skeleton(task.model, DATA).get_parameter("scores.lora_B").dtype == torch.bfloat16


def test_the_base_may_begin_with_the_weights_of_a_file(tmp_path: Path) -> None:
    other = BASE.init_server(DATA, 5)
    save_file(other, tmp_path / "model.safetensors")
    for place in (tmp_path, tmp_path / "model.safetensors"):
        model = Adapters(base=BASE, weights=str(place)).of_seed(0)
        model.check(DATA)
        assert np.array_equal(outputs_of(model, model.init_server(DATA, 0)), base_with(other, DATA.test.features))
    half = Shifted()
    save_torch(half.state_dict(), tmp_path / "half.safetensors")
    model = Adapters(base=own("Shifted"), weights=str(tmp_path / "half.safetensors")).of_seed(0)
    model.check(DATA)
    assert torch.equal(skeleton(model, DATA).get_parameter("0.weight"), half[0].weight)
    with pytest.raises(UserError, match=r"1.bias is \[16\] there and \[8\] in mlp; give the tensors"):
        Adapters(base=MLP(hidden=(8,)), weights=str(tmp_path)).check(DATA)
    with pytest.raises(UserError, match="no model there"):
        Adapters(base=BASE, weights=str(tmp_path / "nothing")).check(DATA)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"targets": ["4.*"]}, "targets = 4.* names no tensor of the base, which has 1.weight, 1.bias, 3.weight"),
        ({"also_trained": ["head"]}, "also_trained = head names no tensor"),
        ({"targets": ["1.bias"]}, "names 1.bias [16] of Linear, and only weights of linear layers have adapters"),
        ({"targets": ["1.weight"], "also_trained": ["1.*"]}, "1.weight, which also_trained trains whole"),
        ({"base": MLP(hidden=()), "also_trained": ["*"]}, "mlp has no linear layer to adapt"),
        ({"base": own("Tied", idle=True)}, "do not depend on idle.lora_"),
        ({"base": own("Encoder")}, "do not depend on layer.linear1.lora_"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_has_no_adapter_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as error:
        Adapters(**{"base": BASE, **fields}).check(DATA)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_a_finished_run_is_exported_with_its_adapters_merged_and_as_a_folder_of_peft(tmp_path: Path) -> None:
    settings = ("model.kind=adapters", "model.base.hidden=[4]", "rounds=1", "evaluate_every=1", "data.clients=10")
    said = narrowcast("run", "fedavg-digits", *settings, "backend.kind=local", "name=lora", "--output", tmp_path)
    assert said.status == 0, said.err
    said = narrowcast("export", "lora", "--merged", "--runs", tmp_path, "--output", tmp_path / "merged.safetensors")
    assert said.status == 0, said.err
    whole, merged = (load_file(tmp_path / name) for name in ("lora/model.safetensors", "merged.safetensors"))
    assert merged.keys() == {"1.weight", "1.bias", "3.weight", "3.bias"}
    wanted = whole["1.weight"] + 8 / 4 * whole["1.lora_B"] @ whole["1.lora_A"]
    assert np.allclose(merged["1.weight"], wanted, rtol=1e-6, atol=1e-7)
    assert not np.array_equal(merged["1.weight"], whole["1.weight"])
    said = narrowcast("export", "lora", "--peft", "--runs", tmp_path, "--output", tmp_path / "adapter")
    assert said.status == 0, said.err
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert np.array_equal(factors["base_model.model.1.lora_A.weight"], whole["1.lora_A"])
    said = narrowcast("export", "lora", "--peft", "--merged", "--runs", tmp_path)
    assert "leave out --merged and --format" in said.err


def test_convolutions_are_refused_and_tied_weights_are_not_merged() -> None:
    images = digits([40], images=True)
    with pytest.raises(UserError, match=r"names 0.weight \[2, 1, 5, 5\] of Conv2d, and only weights of linear layers"):
        Adapters(base=CNN(channels=(2, 2), hidden=8), targets=["0.weight"]).check(images)
    Adapters(base=CNN(channels=(2, 2), hidden=8)).check(images)
    model = Adapters(base=own("Tied")).of_seed(0)
    model.check(DATA)
    with pytest.raises(UserError, match=r"first\.weight is a tensor of another layer too"):
        model.merged(model.init_server(DATA, 0), DATA)


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        (MatrixFactorisation(), "base = matrix_factorisation is no network"),
        (Adapters(), "base = adapters is no network"),
        (MLP(dtype="float64"), "base.dtype is that of the whole model"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_base_is_a_network_with_the_settings_of_the_whole(base: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        Adapters(base=base)
