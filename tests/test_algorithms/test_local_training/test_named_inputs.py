"""Modules with inputs by name: trained and evaluated as a plain loop does, in every way of training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from command_line import narrowcast
from encoder import CLASSES, Encoder, make_texts
from narrowcast.algorithms.federated.apfl import APFL
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedmd import FedMD
from narrowcast.algorithms.federated.scaffold import Scaffold
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.laws.small_tasks import masked_tokens
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.data.classification import PublicSet
from narrowcast.platform.data.formats import TorchDataset
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.data.soundness import UnsoundDataError, check_held_out
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import CNN, MLP, CharLSTM, Softmax, TorchModule
from narrowcast.platform.rounds.fleet import LogNormalFleet
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import Arrays, Chunk, LocalTerms
from running import local

MODEL = TorchModule(factory="encoder:Encoder", dtype="float64")
CLIENTS = 7
QUIET = ("tracking.system_metrics=false", "tracking.flush_seconds=110")


def texts(**fields: Any) -> Samples:
    return TorchDataset(factory="encoder:make_texts", clients=CLIENTS, seed=4, **fields).load()


def make_task(data: Samples, **training: Any) -> Task:
    settings = SGD(**{"learning_rate": 0.2, "batch_size": 8, "epochs": 2, **training})
    task = Task(data, LogNormalFleet().profiles(data.examples, 0), MODEL, settings, 0, PrivateSeed.derived(0))
    task.model.check(data)
    task.training.check(task)
    return task


def named(inputs: Any) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(values)) for name, values in inputs.items()}


def loaded(server: Arrays) -> nn.Module:
    module = Encoder().double()
    module.load_state_dict(named(server))
    return module


def plain(task: Task, server: Arrays, client: int) -> dict[str, np.ndarray]:
    """One client's model after round 1, by a module, keyword arguments and torch's own optimiser."""
    module, training, data = loaded(server), task.training, task.data
    optimiser = torch.optim.SGD(module.parameters(), training.learning_rate, training.momentum)
    one = np.array([client])
    keys = task.private_seed.stream_keys("shuffle", 1, one)
    schedule = draw_schedule(data.examples[one], np.array([training.epochs]), training.batch_size, keys)
    own = data.order[data.indptr[client] : data.indptr[client + 1]]
    for batch, size in zip(schedule.samples, schedule.sizes, strict=True):
        picked = data.train.take(own[batch[:size]])
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(**named(picked.features)), torch.from_numpy(picked.labels)).backward()
        optimiser.step()
    return {name: values.detach().numpy() for name, values in module.named_parameters()}


def difference(one: Arrays, other: Arrays) -> float:
    return max(float(np.abs(np.asarray(one[name]) - np.asarray(other[name])).max()) for name in one)


@pytest.mark.parametrize("execution", ["batched", "per_client"])
def test_training_is_that_of_a_plain_loop(execution: str) -> None:
    task = make_task(texts(), execution=execution, momentum=0.5)
    server = task.model.init_server(task.data, 0)
    updates = task.training.train(server, Chunk(1, 0, np.arange(CLIENTS), {}), task, LocalTerms())
    for client in range(CLIENTS):
        trained = {name: server[name] + values[client] for name, values in updates.changes.items()}
        assert difference(trained, plain(task, server, client)) <= 1e-11


def test_the_mask_reaches_the_module() -> None:
    data = texts()
    hidden = {
        "input_ids": data.test.features["input_ids"],
        "attention_mask": np.ones_like(data.test.features["attention_mask"]),
    }
    shown = replace(data, test=Labelled(hidden, data.test.labels))
    server = MODEL.init_server(data, 0)
    assert MODEL.evaluate(server, {}, data, "test") != MODEL.evaluate(server, {}, shown, "test")


def test_evaluations_are_those_of_the_module() -> None:
    data = texts()
    server = MODEL.init_server(data, 3)
    with torch.no_grad():
        outputs = loaded(server)(**named(data.test.features))
    labels = torch.from_numpy(data.test.labels)
    wanted = nn.functional.cross_entropy(outputs, labels, reduction="none").numpy()
    right = (outputs.argmax(1) == labels).double().numpy()
    got = MODEL.evaluate(server, {}, data, "test")
    assert got == pytest.approx({"loss": wanted.mean(), "accuracy": right.mean()}, abs=1e-12)
    of_clients = MODEL.measure_clients(
        {name: values[None] for name, values in server.items()}, {}, data, "test", np.arange(CLIENTS)
    )
    index = data.of_clients("test")
    for client in range(CLIENTS):
        own = index.order[index.indptr[client] : index.indptr[client + 1]]
        assert of_clients["loss"][client] == pytest.approx(wanted[own].mean(), abs=1e-12)


@pytest.mark.parametrize("execution", ["batched", "per_client"])
def test_start_losses_gradients_and_rules_take_inputs_by_name(execution: str) -> None:
    task = make_task(texts(), execution=execution)
    server, chunk = task.model.init_server(task.data, 0), Chunk(1, 0, np.arange(CLIENTS), {})
    updates = task.training.train(server, chunk, task, LocalTerms(start_loss=True, start_gradient=True))
    assert updates.start_loss is not None
    for client in range(CLIENTS):
        module = loaded(server)
        picked = task.data.train.take(task.data.order[task.data.indptr[client] : task.data.indptr[client + 1]])
        loss = nn.functional.cross_entropy(module(**named(picked.features)), torch.from_numpy(picked.labels))
        loss.backward()
        assert updates.start_loss[client] == pytest.approx(float(loss.detach()), abs=1e-12)
        for name, values in module.named_parameters():
            assert values.grad is not None
            assert np.abs(updates.start_gradient[name][client] - values.grad.numpy()).max() <= 1e-12
    # a rule whose mixture is all its own model takes plain steps with both
    algorithm = APFL(alpha=1.0)
    own = {name: np.stack([values] * CLIENTS) for name, values in server.items()}
    by_rule = task.training.train(
        server,
        chunk,
        task,
        LocalTerms(rule=algorithm.terms(replace(chunk, state=algorithm.init_clients(task)), task).rule, own=own),
    )
    assert difference(by_rule.changes, updates.changes) <= 1e-11


def test_runs_of_other_data_trained_together_are_those_trained_alone() -> None:
    tasks = [make_task(data, execution="batched") for data in (texts(), replace(texts(), seed=9))]
    chunk = Chunk(1, 0, np.array([1, 4]), {})
    server = MODEL.init_server(tasks[0].data, 0)
    together = tasks[0].training.train_together([LocalCall(server, chunk, task, LocalTerms()) for task in tasks])
    for task, each in zip(tasks, together, strict=True):
        alone = task.training.train(server, chunk, task, LocalTerms())
        assert difference(each.changes, alone.changes) <= 1e-12


@pytest.mark.parametrize(
    "algorithm", [FedAvg(), Scaffold(control="gradient"), FedMD(models=(MODEL,))], ids=lambda each: each.kind
)
def test_algorithms_learn(algorithm: Any) -> None:
    data = texts(public=PublicSet(samples=20)) if algorithm.kind == "fedmd" else texts()
    task = make_task(data, batch_size=4, epochs=3)
    algorithm.check(task)
    state = {name: np.array(values) for name, values in algorithm.init_clients(task).items()}
    broadcast = algorithm.broadcast(algorithm.init(task), task, 1).arrays
    result = local(algorithm, task).train(broadcast, [Chunk(1, 0, np.arange(CLIENTS), state)])[0]
    assert result.ledger.delivered.all()
    assert (result.ledger.loss < np.log(CLASSES)).all()


@pytest.mark.parametrize("model", [MLP(), CNN(), Softmax(), CharLSTM()], ids=lambda each: each.kind)
def test_models_of_one_array_refuse_names(model: Any) -> None:
    with pytest.raises(UserError, match=rf"kind = {model.kind} takes one array, and .* has inputs by name .*input_ids"):
        model.check(texts())


def test_a_module_without_an_input_says_which() -> None:
    data = texts()
    renamed = {"input_ids": data.train.features["input_ids"], "mask": data.train.features["attention_mask"]}
    with pytest.raises(
        UserError,
        match=r"features of .*, input_ids \[n, 10\] int64, mask \[n, 10\] bool .*unexpected keyword argument 'mask'",
    ):
        MODEL.check(replace(data, train=Labelled(renamed, data.train.labels), test=data.test.take(np.arange(0))))


def test_digests_know_names_and_no_order() -> None:
    data = masked_tokens(np.array([3, 5]))
    features = data.train.features
    assert isinstance(features, Mapping)
    turned = Labelled(dict(reversed(list(features.items()))), data.train.labels)
    assert replace(data, train=turned).digest == data.digest
    other = Labelled({"input_ids": features["input_ids"], "mask": features["attention_mask"]}, data.train.labels)
    assert replace(data, train=other).digest != data.digest


def test_unsound_inputs_are_found() -> None:
    data = masked_tokens(np.array([3, 5]))
    features = dict(data.test.features)
    with pytest.raises(UnsoundDataError, match="test has 3 features attention_mask and 20 labels"):
        check_held_out(replace(data, test=Labelled({**features, "attention_mask": np.ones((3, 10))}, data.test.labels)))
    with pytest.raises(UnsoundDataError, match=r"test has features input_ids \[n, 10\] int64 and train attention_mask"):
        check_held_out(replace(data, test=Labelled({"input_ids": features["input_ids"]}, data.test.labels)))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_two_actors_give_the_model_of_one_process(tmp_path: Path) -> None:
    parts = make_texts()
    arrays = {f"x_{part}.{name}": values for part, each in parts.items() for name, values in each.inputs.items()}
    np.savez(tmp_path / "texts.npz", **arrays, **{f"y_{part}": each.labels for part, each in parts.items()})
    (tmp_path / "texts.yaml").write_text(
        f"data: {{kind: npz, path: {tmp_path / 'texts.npz'}, clients: 7}}\n"
        "model: {kind: torch, factory: encoder:Encoder}\n"
        "algorithm: fedavg\nrounds: 3\nclients_per_round: 5\nchunk_size: 2\nevaluate_clients: [test]\n"
        "training: {kind: adamw, learning_rate: 0.01, learning_rate_schedule: {kind: warmup, steps: 9}}\n"
    )
    (tmp_path / "encoder.py").write_text((Path(__file__).parents[2] / "fixtures" / "encoder.py").read_text())
    shas = []
    for backend in (["backend=local"], ["backend=ray", "backend.actors=2"]):
        folder = tmp_path / backend[0]
        ended = narrowcast(
            "run", tmp_path / "texts.yaml", *backend, "tracking.system_metrics=false", "--output", folder
        )
        assert ended.status == 0, ended.err + ended.out
        shas.append(json.loads((folder / "texts" / "result.json").read_text())["model_sha256"])
    assert shas[0] == shas[1]
