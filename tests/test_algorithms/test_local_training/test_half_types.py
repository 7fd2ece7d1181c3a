"""Modules of bfloat16 and float16: steps of float32 on gradients of the half type, as in a plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import narrowcast as nc
from encoder import half_encoder
from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.laws import model_laws
from narrowcast.laws.law import evaluate_laws
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.formats import TorchDataset
from narrowcast.platform.models.networks import CNN, MLP, VGG9, CharLSTM, Softmax, TorchModule
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.rounds.fleet import LogNormalFleet
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import Arrays, Chunk, LocalTerms
from running import local
from sampling import sampled

CLIENTS = 5


def make_task(arguments: dict[str, Any], dtype: Any = "float32", **training: Any) -> Task:
    data = TorchDataset(factory="encoder:make_texts", clients=CLIENTS, seed=4).load()
    factory = "encoder:half_encoder" if dtype == "float32" else "encoder:Encoder"
    model = TorchModule(factory=factory, arguments=arguments, dtype=dtype)
    settings = SGD(**{"learning_rate": 0.1, "batch_size": 8, "epochs": 2, "execution": "per_client", **training})
    task = Task(data, LogNormalFleet().profiles(data.examples, 0), model, settings, 0, PrivateSeed.derived(0))
    model.check(data)
    settings.check(task)
    return task


def named(inputs: Any) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(values)) for name, values in inputs.items()}


def plain(task: Task, server: Arrays, client: int, module: nn.Module) -> dict[str, np.ndarray]:
    """One client's model after round 1: copies of float32 that step, cast for each forward pass."""
    kept = {name: values.requires_grad_() for name, values in named(server).items()}
    types = {name: each.dtype for name, each in module.named_parameters()}
    one, data, training = np.array([client]), task.data, task.training
    keys = task.private_seed.stream_keys("shuffle", 1, one)
    schedule = draw_schedule(data.examples[one], np.array([training.epochs]), training.batch_size, keys)
    own = data.order[data.indptr[client] : data.indptr[client + 1]]
    for batch, size in zip(schedule.samples, schedule.sizes, strict=True):
        picked = data.train.take(own[batch[:size]])
        cast = {name: values.to(types[name]) for name, values in kept.items()}
        outputs = functional_call(module, cast, (), named(picked.features)).float()
        loss = nn.functional.cross_entropy(outputs, torch.from_numpy(picked.labels))
        gradients = torch.autograd.grad(loss, list(kept.values()))
        with torch.no_grad():
            for values, gradient in zip(kept.values(), gradients, strict=True):
                values.sub_(gradient, alpha=training.learning_rate)
    return {name: values.detach().numpy() for name, values in kept.items()}


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize(("frozen", "by_field"), [(False, False), (True, False), (False, True)])
def test_steps_are_those_of_a_plain_loop(frozen: bool, by_field: bool, kind: str) -> None:
    task = make_task({}, kind) if by_field else make_task({"frozen": frozen, "kind": kind})
    server = task.model.init_server(task.data, 0)
    assert ("embedding.weight" in server) is not frozen
    assert all(values.dtype == np.float32 for values in server.values())
    module = half_encoder(frozen=frozen, kind=kind)
    module.load_state_dict({**module.state_dict(), **named(server)})
    if frozen:
        fixed = task.model.state(server, task.data)["embedding.weight"]
        with torch.no_grad():
            module.get_parameter("embedding.weight").copy_(torch.from_numpy(np.array(fixed)))
    updates = task.training.train(server, Chunk(1, 0, np.arange(CLIENTS), {}), task, LocalTerms())
    for client in range(CLIENTS):
        for name, wanted in plain(task, server, client, module).items():
            assert np.abs(server[name] + updates.changes[name][client] - wanted).max() <= 1e-6
        assert np.abs(updates.changes["head.weight"][client]).max() > 1e-3


def test_small_steps_add_up_and_take_four_bytes() -> None:
    """Steps below the spacing of bfloat16 would be lost one by one."""
    task = make_task({}, learning_rate=1e-5, epochs=1)
    server = task.model.init_server(task.data, 0)
    state = {name: np.array(values) for name, values in FedAvg().init_clients(task).items()}
    broadcast = FedAvg().broadcast(FedAvg().init(task), task, 1).arrays
    result = local(FedAvg(), task).train(broadcast, [Chunk(1, 0, np.arange(CLIENTS), state)])[0]
    n_values = sum(values.size for values in server.values())
    assert (result.ledger.uplink_bits == dense_wire_bits(n_values)).all()
    updates = task.training.train(server, Chunk(1, 0, np.arange(CLIENTS), {}), task, LocalTerms())
    moved = np.concatenate([values.ravel() for values in updates.changes.values()])
    assert (np.abs(moved) < 1e-3).all()
    assert (moved != 0).mean() > 0.5


def test_evaluations_compute_in_the_half_type() -> None:
    task = make_task({})
    server = task.model.init_server(task.data, 0)
    module = half_encoder()
    module.load_state_dict(named(server))
    with torch.no_grad():
        outputs = module(**named(task.data.test.features)).float()
    wanted = nn.functional.cross_entropy(outputs, torch.from_numpy(task.data.test.labels))
    assert task.model.evaluate(server, {}, task.data, "test")["loss"] == pytest.approx(float(wanted), abs=1e-6)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", sampled([Softmax, MLP, CNN, CharLSTM, VGG9], {Softmax, MLP, CNN}))
def test_networks_of_the_catalog_keep_the_laws_of_models_in_half_types(model: type[NeuralNetwork], kind: Any) -> None:
    for verdict in evaluate_laws(model_laws.LAWS, model_laws.cases(model(dtype=kind))):
        assert verdict.reason is None, verdict


FEDMD = {"kind": "fedmd", "models": ["softmax", {"kind": "mlp", "hidden": [8]}]}


@pytest.mark.parametrize("algorithm", ["fedavg", FEDMD, "fedma"], ids=["fedavg", "fedmd", "fedma"])
def test_algorithms_hold_and_send_float32_of_half_types(algorithm: Any) -> None:
    settings = {
        "data": {"kind": "digits", "clients": 10, **({"public": {"samples": 50}} if algorithm is FEDMD else {})},
        "model": {"kind": "mlp", "hidden": [16]},
        "algorithm": algorithm,
        "evaluate_clients": ["test"] if algorithm is FEDMD else [],
        **{"rounds": 3, "evaluate_every": 3, "clients_per_round": 10},
    }
    whole, half = (
        list(nc.rounds("fedavg-digits", {**settings, "model.dtype": dtype})) for dtype in ("float32", "bfloat16")
    )
    for one, other in zip(whole, half, strict=True):
        assert one.record.uplink_bits == other.record.uplink_bits
        assert one.record.downlink_bits == other.record.downlink_bits
    assert half[-1].state is not None
    assert all(values.dtype != np.float16 for values in half[-1].state.server.values())
    accuracies = {
        name: value for name, value in half[-1].metrics.items() if name.endswith(("accuracy", "accuracy.mean"))
    }
    assert accuracies
    for name, value in accuracies.items():
        assert value == pytest.approx(whole[-1].metrics[name], abs=0.1)
