"""Modules of all kinds: two rounds of FedAvg against a plain loop over clients with torch's own optimiser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import modules
from digits import digits, make_task, relative_error, run
from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedma import FedMA
from narrowcast.algorithms.federated.submodel import Submodel
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.platform.contracts import LocalCall, Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import MLP, TorchModule
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Chunk, LocalTerms

COUNTS = [21, 8, 40, 3, 17]
ROUNDS = 2
Fields = Mapping[str, Any]

PARTS = {"output": "logits"}
TRAINED: dict[str, tuple[str, Fields, Fields]] = {
    "frozen body": ("FrozenBody", {}, {}),
    "frozen layer of a chain": ("frozen_chain", {}, {}),
    "tied and twice": ("Tied", {}, {}),
    "layer twice in a chain": ("tied_chain", {}, {}),
    "tied chain": ("weight_tied_chain", {}, {}),
    "table": ("Positions", {"persistent": True}, {}),
    "table that is not saved": ("Positions", {"persistent": False}, {}),
    "values while built": ("Rates", {}, {}),
    "weight norm": ("weight_norm", {}, {}),
    "weight norm by hook": ("weight_norm_by_hook", {}, {}),
    "orthogonal": ("orthogonal", {}, {}),
    "lazy": ("lazy", {}, {}),
    "compiled": ("wrapped", {"how": "compiled"}, {}),
    "compiled inside": ("wrapped", {"how": "compiled inside"}, {}),
    "parallel": ("wrapped", {"how": "parallel"}, {}),
    "tuple": ("Parts", {"kind": "tuple"}, {"output": 1}),
    "mapping": ("Parts", {"kind": "mapping"}, PARTS),
    "object": ("Parts", {"kind": "object"}, PARTS),
    "tensor when evaluated": ("Parts", {"kind": "tensor when evaluated"}, {"output": 1}),
    "unused layer": ("Unused", {}, {}),
    "derived layer": ("doubled", {}, {}),
    "derived chain": ("shifted", {}, {}),
    "hook": ("hooked", {}, {}),
    "flattened late": ("flattened_late", {}, {}),
}


class FrozenMLP(MLP):
    """A perceptron whose first layer is frozen."""

    all_trained: ClassVar[bool] = False

    def module(self, data: Any) -> nn.Module:
        module: Any = super().module(data)
        module[1].requires_grad_(False)
        return module  # type: ignore[no-any-return]


def model_of(factory: str, arguments: Fields, fields: Fields = {}) -> TorchModule:  # noqa: B006
    return TorchModule(factory=f"modules:{factory}", arguments=dict(arguments), **fields)


def built(task: Task) -> nn.Module:
    """The module as the factory gives it from the run's seed, without what the platform does to it."""
    model: Any = task.model
    seed = int(generator(task.seed, "model").integers(2**63))
    torch.manual_seed(seed)
    module = getattr(modules, model.factory.partition(":")[2])(**model.arguments)
    if model.arguments.get("how"):
        torch.manual_seed(seed)
        module = modules.chain()  # what is wrapped
    module(torch.zeros(1, 64))  # gives lazy layers their shapes
    return module  # type: ignore[no-any-return]


def scores(module: nn.Module, features: Tensor, output: Any) -> Tensor:
    outputs: Any = module(features)
    if isinstance(outputs, Tensor):
        return outputs
    part: Tensor = outputs[output] if isinstance(outputs, tuple | dict) else getattr(outputs, output)
    return part


def plain_rounds(task: Task) -> dict[str, Tensor]:
    """The global `state_dict` after some rounds of FedAvg: every client, one after the other, by `torch.optim.SGD`."""
    server = built(task).train()
    for round_index in range(1, ROUNDS + 1):
        begin = {name: each.detach().clone() for name, each in server.named_parameters()}
        total = {name: torch.zeros_like(each) for name, each in begin.items()}
        for client, count in enumerate(COUNTS):
            with torch.no_grad():
                for name, each in server.named_parameters():
                    each.copy_(begin[name])
            train_client(task, server, client, round_index)
            for name, each in server.named_parameters():
                total[name] += (each.detach() - begin[name]) * (count / sum(COUNTS))
        with torch.no_grad():
            for name, each in server.named_parameters():
                each.copy_(begin[name] + total[name])
    return server.state_dict()


def train_client(task: Task, module: nn.Module, client: int, round_index: int) -> None:
    training, one = task.training, np.array([client])
    optimiser = torch.optim.SGD([each for each in module.parameters() if each.requires_grad], training.learning_rate)
    schedule = draw_schedule(
        task.data.examples[one],
        np.array([training.epochs]),
        training.batch_size,
        task.private_seed.stream_keys("shuffle", round_index, one),
    )
    own = task.data.order[task.data.indptr[client] : task.data.indptr[client + 1]]
    for batch, size in zip(schedule.samples, schedule.sizes, strict=True):
        picked = task.data.train.take(own[batch[:size]])
        outputs = scores(module, torch.from_numpy(picked.features), getattr(task.model, "output", None))
        optimiser.zero_grad()
        nn.functional.cross_entropy(outputs, torch.from_numpy(picked.labels)).backward()
        optimiser.step()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("execution", ["per_client", "batched"])
@pytest.mark.parametrize("kind", list(TRAINED))
def test_two_rounds_are_those_of_a_plain_loop(kind: str, execution: str) -> None:
    task = make_task(digits(COUNTS), model_of(*TRAINED[kind]), execution=execution)
    module = built(task)
    state = run(FedAvg(), task, n_rounds=ROUNDS, clients=len(COUNTS))
    names = [name for name, each in module.named_parameters() if each.requires_grad]
    trained = FedAvg().final(state.server)
    assert list(trained) == names
    n_values = sum(each.numel() for each in module.parameters() if each.requires_grad)
    assert state.uplink_bits == ROUNDS * len(COUNTS) * dense_wire_bits(n_values)
    wanted = {name: each.numpy() for name, each in plain_rounds(task).items()}
    got = task.model.state(trained, task.data)
    moving = {name for name in wanted if wanted[name].dtype.kind == "f" and wanted[name].any()}
    assert got.keys() == wanted.keys()
    assert relative_error({name: got[name] for name in moving}, {name: wanted[name] for name in moving}) <= 3e-5
    kept = [name for name, each in module.state_dict(keep_vars=True).items() if not each.requires_grad]
    assert all((got[name] == wanted[name]).all() for name in kept)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_is_evaluated_is_what_the_module_gives() -> None:
    for name in ("frozen body", "table that is not saved", "mapping", "tensor when evaluated", "weight norm by hook"):
        task = make_task(digits(COUNTS), model_of(*TRAINED[name]))
        start, module = task.initial_parameters(), built(task).eval()
        test = task.data.test
        with torch.no_grad():
            outputs = scores(module, torch.from_numpy(test.features), getattr(task.model, "output", None))
        right = float((outputs.argmax(1).numpy() == test.labels).mean())
        assert task.model.evaluate(start, {}, task.data, "test")["accuracy"] == pytest.approx(right, abs=1e-9)


REFUSED: list[tuple[str, Fields, Fields, str]] = [
    ("batch_norm", {}, {}, "changes 1.running_mean, .* of BatchNorm1d 1, .* replace batch norm by group norm"),
    ("batch_norm", {"tracked": False}, {}, "takes no batch of one sample .ValueError: Expected more than 1 value"),
    ("spectral_norm", {}, {}, "changes 0.parametrizations.weight.0._u, .* make them constants"),
    ("MovingAverage", {}, {}, "changes mean.weight of Linear mean"),
    ("wrapped", {"how": "scripted"}, {}, "is compiled by torch.jit"),
    ("wrapped", {"how": "traced inside"}, {}, "is compiled by torch.jit"),
    ("Unreached", {}, {}, "has extra.weight of a lazy layer that a forward pass does not reach"),
    ("Parts", {"kind": "tuple"}, {}, r"returns tuple of 0 \[2, 16\], 1 \[2, 10\] in place of a tensor; .*output = 0"),
    ("Parts", {"kind": "mapping"}, {}, r"returns dict of hidden \[2, 16\], logits \[2, 10\] .*output = logits"),
    (
        "Parts",
        {"kind": "mapping"},
        {"output": "x"},
        r"output = x: Parts returns dict of hidden .*use one of these",
    ),
    ("Parts", {"kind": "mapping"}, {"output": "hidden"}, r"returns \[2, 16\], expected scores \[n, 10\]"),
    ("Parts", {"kind": "none"}, {}, "returns NoneType in place of a tensor; return a tensor"),
    ("broken", {"how": "raises"}, {}, "cannot be built .OSError: weights.pt is missing.$"),
    ("broken", {"how": "exits"}, {}, "cannot be built .SystemExit: 0"),
    ("broken", {"how": "recurses"}, {}, "cannot be built .RecursionError"),
    ("broken", {"how": "random"}, {}, "has other values of weight in every build"),
    ("broken", {"how": "random body"}, {}, "has other values of body.weight in every build"),
    ("broken", {"how": "meta"}, {}, 'has weight on the device "meta"'),
    ("broken", {"how": "class"}, {}, "returned the class FrozenBody in place of an object"),
    ("broken", {"how": "function"}, {}, "returned a function, chain; it must return a torch.nn.Module"),
    ("broken", {"how": "none"}, {}, "returned NoneType; it must return a torch.nn.Module"),
    ("broken", {"how": "frozen"}, {}, "has no parameter with requires_grad"),
    ("broken", {"how": "empty"}, {}, "has no parameter with requires_grad"),
    ("enormous", {}, {}, "memory"),
    ("raises", {}, {}, r"does not take the features of digits, \[n, 64\] float32 .KeyError: 'no such layer'"),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("factory", "arguments", "fields", "message"), REFUSED)
def test_what_cannot_train_is_refused_in_one_line(
    factory: str, arguments: Fields, fields: Fields, message: str
) -> None:
    with pytest.raises(UserError, match=message) as refused:
        make_task(digits([9, 8, 17]), model_of(factory, arguments, fields))
    assert "\n" not in str(refused.value)


def test_batch_statistics_are_not_taken_over_padding() -> None:
    data = digits([8, 16, 20])
    for model, reason in (
        (model_of("Centred", {}), "its outputs for a sample depend on the rest of the batch, which is padded"),
        (model_of("batch_norm", {"tracked": False}), "cannot be batched .ValueError: Expected more than 1 value"),
    ):
        task = make_task(data, model)
        assert task.training.mode(task) == "per_client"
        with pytest.raises(UserError, match=reason):
            make_task(data, model, execution="batched")


def test_a_build_draws_from_the_seed_alone_and_leaves_the_generators_alone() -> None:
    data, model = digits(COUNTS), model_of("FrozenBody", {})
    torch.manual_seed(1)
    wanted = torch.rand(1)
    torch.manual_seed(1)
    one = model.of_seed(4).loaded(model.init_server(data, 4), data).state_dict()
    assert torch.rand(1) == wanted
    assert (one["body.weight"] == frozen_body(4).body.weight).all()
    assert (one["body.weight"] != frozen_body(5).body.weight).any()


def frozen_body(seed: int) -> Any:
    torch.manual_seed(int(generator(seed, "model").integers(2**63)))
    return modules.FrozenBody()


def test_other_frozen_values_than_where_the_run_began_are_refused() -> None:
    data, model = digits(COUNTS), model_of("FrozenBody", {})
    here, there = (model.of_seed(seed).fixed_sha256(data) for seed in (0, 1))
    assert here != there
    model.pinned(here).fixed_names(data)
    with pytest.raises(UserError, match="has other frozen parameters or buffers than where the run began"):
        model.pinned(there).loaded(model.init_server(data, 0), data)


def test_runs_of_other_frozen_values_are_not_trained_as_one_program() -> None:
    data = digits(COUNTS)
    one = make_task(data, model_of("frozen_chain", {}), execution="batched")
    calls = [
        LocalCall(task.initial_parameters(), Chunk(1, 0, np.arange(len(COUNTS)), {}), task, LocalTerms())
        for task in (one, replace(one, seed=1))
    ]
    for call, updates in zip(calls, one.training.train_together(calls), strict=True):
        alone = one.training.train(call.server, call.chunk, call.task, call.terms)
        assert relative_error(updates.changes, alone.changes) == 0


@pytest.mark.parametrize("algorithm", [Submodel(widths=(0.5, 1.0)), FedMA()], ids=lambda each: each.kind)
def test_slices_of_a_network_with_frozen_parameters_are_refused(algorithm: Any) -> None:
    task = make_task(digits(COUNTS), FrozenMLP(hidden=(8,)))
    with pytest.raises(UserError, match=f"algorithm.kind = {algorithm.kind} gives .* 1.bias of .* is not trained"):
        algorithm.check(task)
