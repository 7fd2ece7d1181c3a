"""Experiments in float64 from end to end: identities between methods, minimisers, payloads, resumed runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import narrowcast
from narrowcast.algorithms.codecs.messages import DensePayload, dense_wire_bits
from narrowcast.algorithms.codecs.wire import FLOAT64
from narrowcast.experiment import Experiment, build_experiment, load_experiment
from narrowcast.platform.config.yaml import write_yaml
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import TorchModule
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import LocalExecutor, rounds
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run, RunState
from narrowcast.platform.storage.checkpoint import load_checkpoint, save_checkpoint
from narrowcast.platform.types import Arrays
from narrowcast.runs.folder import CONFIG
from narrowcast.runs.outputs import full_upload_bits
from narrowcast.runs.prepared import prepare_resume

COUNTS = [3, 9, 4, 12, 7, 5]
CHAIN = {"kind": "mlp", "hidden": [6]}
CURVED = {"kind": "torch", "factory": f"{__name__}:Curved"}
LINEAR = {"kind": "softmax"}
FULL = {"batch_size": "all", "epochs": 1}


class Curved(nn.Module):
    """A network whose gradients only autograd knows, of an attribute that batching does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.second(torch.sin(self.first(features)))


def labelled(counts: Sequence[int] = COUNTS, *, numbers: bool = False) -> Samples:
    """Clients with classes, or one number, that depend on four features in a way of each client's own."""
    random, total = np.random.default_rng(3), sum(counts)
    features = random.normal(size=(total + 20, 4)).astype(np.float32)
    weights = random.normal(size=(4, 3)) + random.normal(size=(len(counts), 4, 3))
    owner = np.append(np.repeat(np.arange(len(counts)), counts), np.zeros(20, dtype=int))
    scores = np.einsum("nf,nfk->nk", features, weights[owner])
    labels = scores[:, :1].astype(np.float32) if numbers else scores.argmax(axis=1)
    return Samples(
        name="labelled",
        source="drawn",
        n_classes=0 if numbers else 3,
        train=Labelled(features[:total], labels[:total]),
        validation=Labelled(features[:0], labels[:0]),
        test=Labelled(features[total:], labels[total:]),
        order=np.arange(total),
        indptr=np.concatenate([[0], np.cumsum(counts)]),
    )


def experiment(algorithm: Any, *, model: Any = None, training: Any = None, **plan: Any) -> Experiment:
    settings = {"batch_size": 4, "epochs": 2, "learning_rate": 0.1, **(training or {})}
    values = {
        **{"name": "float64", "data": "digits", "backend": "local", "algorithm": algorithm, "training": settings},
        **{"rounds": 4, "clients_per_round": 6, "chunk_size": 4, "model": {"dtype": "float64", **(model or CHAIN)}},
    }
    return build_experiment({**values, **plan}, "a test")


def run(of: Experiment, data: Samples | None = None, state: RunState | None = None) -> list[Outcome]:
    whole = Run(of, of.secured_algorithm, of.task(labelled() if data is None else data))
    return list(rounds(whole, LocalExecutor(whole), state))


def final(of: Experiment, data: Samples | None = None) -> Arrays:
    """The model after the last round."""
    state = run(of, data)[-1].state
    assert state is not None
    return of.algorithm.final(state.server)


def difference(one: Arrays, other: Arrays) -> float:
    assert one.keys() == other.keys() and all(each.dtype == np.float64 for each in (*one.values(), *other.values()))
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


# Identities


def central(of: Experiment, make: Callable[[Any], torch.optim.Optimizer]) -> Arrays:
    """The model after as many steps of torch's optimiser on all samples; a gradient is that of a client's step."""
    data = labelled()
    task = of.task(data)
    module = task.model.module(data).double()
    module.load_state_dict({name: torch.from_numpy(each) for name, each in task.model.init_server(data, 0).items()})
    features, labels = torch.from_numpy(data.train.features).double(), torch.from_numpy(data.train.labels)
    optimiser = make(module.parameters())
    for _ in range(of.rounds):
        optimiser.zero_grad()
        (task.training.learning_rate * nn.functional.cross_entropy(module(features), labels)).backward()
        optimiser.step()
    return {name: each.detach().numpy() for name, each in module.named_parameters()}


@pytest.mark.parametrize("execution", ["batched", "per_client"])
@pytest.mark.parametrize("model", [CHAIN, CURVED], ids=["chain", "autograd"])
def test_one_full_step_on_each_client_is_gradient_descent_on_all_samples(model: Any, execution: str) -> None:
    of = experiment("fedavg", model=model, training={**FULL, "execution": execution})
    assert difference(final(of), central(of, lambda x: torch.optim.SGD(x, 1.0))) <= 1e-12


def test_fedadam_is_torchs_adam_on_the_clients_mean_change() -> None:
    adam = {"kind": "adam", "bias_correction": True, "beta1": 0.8, "beta2": 0.9, "tau": 1e-3}
    of = experiment({"kind": "fedavg", "server_optimizer": adam, "server_learning_rate": 0.2}, training=FULL)
    assert difference(final(of), central(of, lambda x: torch.optim.Adam(x, 0.2, betas=(0.8, 0.9), eps=1e-3))) <= 1e-12


def test_feddyn_with_a_vanishing_alpha_moves_twice_as_far_as_fedavg() -> None:
    # by the mean change, and by -h / alpha, which is the mean change once more if all clients take part
    feddyn, fedavg = (
        final(experiment(each, rounds=1))
        for each in ({"kind": "feddyn", "alpha": 1e-14}, {"kind": "fedavg", "weights": "equal"})
    )
    start = experiment("fedavg").model.init_server(labelled(), 0)
    assert difference({name: start[name] + 2 * (fedavg[name] - start[name]) for name in start}, feddyn) <= 1e-12


@pytest.mark.parametrize(
    ("one", "training"),
    [
        ({"kind": "fedavg", "server_optimizer": {"kind": "momentum", "momentum": 0}}, {}),
        ({"kind": "fedprox", "mu": 0}, {}),
        ({"kind": "fednova"}, {"batch_size": "all", "epochs": 3}),
        ({"kind": "qffl", "q": 0, "weights": "examples"}, {}),
        ({"kind": "qffl", "q": 0}, {}),
    ],
    ids=["FedAvgM(0)", "FedProx(0)", "FedNova with equal steps", "q = 0", "q = 0, equal weights"],
)
def test_methods_that_are_fedavg(one: dict[str, Any], training: dict[str, Any]) -> None:
    equal = one == {"kind": "qffl", "q": 0}
    fedavg = {"kind": "fedavg", "weights": "equal" if equal else "examples"}
    curved = experiment(one, model=CURVED, training=training), experiment(fedavg, model=CURVED, training=training)
    chain = experiment(one, training=training), experiment(fedavg, training=training)
    assert all(difference(final(ours), final(theirs)) <= 1e-12 for ours, theirs in (curved, chain))


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kind": "fedprox", "mu": 0.3}, {"kind": "scaffold"}, {"kind": "scaffold", "control": "gradient"},
        {"kind": "feddyn", "alpha": 0.1}, {"kind": "qffl"}, {"kind": "afl"}, {"kind": "fedpara"},
        {"kind": "scolr", "rank": 2}, {"kind": "fedavg", "server_optimizer": "adam"},
    ],
    ids=lambda each: "-".join(map(str, each.values())),
)  # fmt: skip
def test_batched_training_is_that_of_single_clients(algorithm: Any) -> None:
    settings = {"momentum": 0.5, "weight_decay": 0.01, "clip_norm": 1.0}
    batched, single = (
        final(experiment(algorithm, training={**settings, "execution": each})) for each in ("batched", "per_client")
    )
    assert difference(batched, single) <= 1e-12


def test_float32_is_the_same_run_to_its_precision() -> None:
    exact = final(experiment("fedavg"))
    rounded = final(experiment("fedavg", model={**CHAIN, "dtype": "float32"}))
    errors = [np.abs(exact[name] - rounded[name]).max() for name in exact]
    assert 1e-9 < max(errors) < 1e-5


# Minimisers


def least_squares(data: Samples) -> np.ndarray:
    """The minimiser of the mean of the clients' mean squared errors, with the intercept last."""
    features = np.hstack([data.train.features.astype(float), np.ones((len(data.train), 1))])
    roots = np.repeat(data.examples, data.examples) ** -0.5
    rows, wanted = features * roots[:, None], data.train.labels[:, 0].astype(float) * roots
    return np.asarray(np.linalg.lstsq(rows, wanted, rcond=None)[0])


@pytest.mark.parametrize("control", ["update", "gradient"])
def test_scaffold_reaches_the_minimiser_of_least_squares_where_fedavg_does_not(control: str) -> None:
    data = labelled([20, 15, 30, 25, 18, 22], numbers=True)
    settings: dict[str, Any] = {"model": LINEAR, "training": {"batch_size": "all", "epochs": 5, "learning_rate": 0.1}}

    def distance(algorithm: dict[str, Any]) -> float:
        found = final(experiment(algorithm, rounds=60, evaluate_every=60, chunk_size=6, **settings), data)
        return float(np.abs(np.append(found["1.weight"][0], found["1.bias"]) - least_squares(data)).max())

    assert distance({"kind": "scaffold", "control": control}) <= 1e-10
    assert distance({"kind": "fedavg", "weights": "equal"}) >= 1e-3


def test_option_1_sends_the_gradient_of_all_samples_at_the_servers_model() -> None:
    of, data = experiment({"kind": "scaffold", "control": "gradient"}, rounds=1, model=CURVED), labelled()
    state = run(of, data)[-1].state
    assert state is not None
    module = of.model.module(data).double()  # type: ignore[attr-defined]
    start = of.model.init_server(data, 0)
    module.load_state_dict({name: torch.from_numpy(each) for name, each in start.items()})
    for client in range(6):
        own = slice(data.indptr[client], data.indptr[client + 1])
        outputs = module(torch.from_numpy(data.train.features[own]).double())
        loss = nn.functional.cross_entropy(outputs, torch.from_numpy(data.train.labels[own]))
        wanted = torch.autograd.grad(loss, list(module.parameters()))
        for (name, _), each in zip(module.named_parameters(), wanted, strict=True):
            assert np.abs(state.clients[f"control/{name}"][client] - each.numpy()).max() <= 1e-12


# Messages


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kind": "fedavg"},
        {"kind": "scaffold", "control_upload": "sent"},
        {"kind": "feddyn"},
        {"kind": "fedavg", "aggregator": "geometric_median"},
    ],
    ids=lambda each: "-".join(each.values()),
)
def test_a_value_takes_eight_bytes_each_way(algorithm: Any) -> None:
    of = experiment(algorithm, rounds=1)
    task, ledger = of.task(labelled()), run(of)[0].ledger
    broadcast = of.algorithm.broadcast(of.algorithm.init(task), task, 1)
    sent = DensePayload.from_bytes(broadcast.full.to_bytes())
    assert sent.values.dtype == np.float64
    bits = dense_wire_bits(sent.values.size, FLOAT64)
    assert bits == 8 * len(broadcast.full.to_bytes()) == 8 * (8 + 1 + 8 * sent.values.size)
    assert set(ledger.uplink_bits) == set(ledger.downlink_bits) == {bits}
    said = of.algorithm.upload_bits(broadcast.arrays, task, np.arange(6))
    assert said is not None and set(said) == {bits}


def test_losses_take_eight_bytes_and_counts_four() -> None:
    sizes = {kind: int(run(experiment({"kind": kind}, rounds=1))[0].ledger.uplink_bits[0]) for kind in LONGER}
    assert {kind: bits - sizes["fedavg"] for kind, bits in sizes.items()} == LONGER


LONGER = {"fedavg": 0, "qffl": 64, "afl": 64, "fednova": 32, "scaffold": 32}


def test_reports_still_count_the_whole_model_in_float32() -> None:
    sizes = []
    for dtype in ("float32", "float64"):
        of = experiment("fedavg", model={**CHAIN, "dtype": dtype})
        sizes.append(full_upload_bits(of, of.task(labelled())))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "codec",
    [
        [{"kind": "top_k", "fraction": 1}], [{"kind": "random_k", "fraction": 1}], ["rotate"], ["error_feedback"],
        [{"kind": "atomo", "fraction": 2}],
    ],
    ids=lambda each: str(each[0]),
)  # fmt: skip
def test_codecs_that_send_all_values_keep_their_precision(codec: Any) -> None:
    coded, plain = (final(experiment({"kind": "fedavg", "codec": each})) for each in (codec, []))
    assert difference(coded, plain) <= 1e-12


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # MLflow's SQL store
def test_two_actors_give_the_model_of_one_process(tmp_path: Path) -> None:
    sources: dict[str, Any] = {"data": {"kind": "digits", "clients": 10}, "training": {"learning_rate": 0.1}}
    of = experiment({"kind": "scaffold", "control": "gradient"}, **sources)
    results = [
        narrowcast.run(of, {"backend.kind": kind, "name": kind, **more}, output=tmp_path)
        for kind, more in (("local", {}), ("ray", {"backend.actors": 2}))
    ]
    assert results[0].model_sha256 == results[1].model_sha256
    assert {each.dtype for each in results[0].model().state_dict().values()} == {torch.float64}


@pytest.mark.parametrize("kind", ["fedavg", "scolr"])
def test_sums_of_integers_decode_to_float64(kind: str) -> None:
    of = experiment({"kind": kind})
    layout = of.algorithm.sum_layout(of.task(labelled()), 6)  # type: ignore[attr-defined]
    assert all(values.dtype == np.float64 for values in layout.zeros().values())


# Runs


def test_a_resumed_run_is_the_straight_one_bit_for_bit(tmp_path: Path) -> None:
    of = experiment({"kind": "scaffold", "codec": ["error_feedback", {"kind": "top_k", "fraction": 0.3}]}, rounds=5)
    straight, half = run(of)[-1].state, run(of.model_copy(update={"rounds": 2}))[-1].state
    assert straight is not None and half is not None
    save_checkpoint(tmp_path, half, of.digest())
    again, digest, _ = load_checkpoint(tmp_path, RunState)
    assert digest == of.digest()
    resumed = run(of, state=again)[-1].state
    assert resumed is not None
    assert model_sha256(of.algorithm, resumed) == model_sha256(of.algorithm, straight)


def test_a_checkpoint_in_float32_is_refused_in_float64(tmp_path: Path) -> None:
    settings = {"data": {"kind": "digits", "clients": 6}, "rounds": 1, "name": "rounded"}
    rounded = experiment("fedavg", model={**CHAIN, "dtype": "float32"}, **settings)
    exact = experiment("fedavg", **settings)
    assert rounded.digest() != exact.digest()
    write_yaml(rounded.plain(), tmp_path / CONFIG)
    with pytest.raises(UserError, match=r"model\.dtype was 'float32', now 'float64'; resume with its own"):
        prepare_resume(tmp_path, exact)
    whole = Run(rounded, rounded.algorithm, rounded.task(rounded.data_source.load()))
    state = next(iter(rounds(whole, LocalExecutor(whole)))).state
    assert state is not None
    save_checkpoint(tmp_path / "checkpoint", replace(state, round_index=0), rounded.digest())
    write_yaml(exact.plain(), tmp_path / CONFIG)
    with pytest.raises(UserError, match=f"is not of its {CONFIG}; start the run again"):
        prepare_resume(tmp_path, None)


def test_matrix_factorisation_has_no_float64() -> None:
    with pytest.raises(UserError, match=r"model\.dtype is unknown; known here: embedding_dim, kind; a field"):
        load_experiment("fedmf-ml1m", ["model.dtype=float64"])


def test_a_module_in_float64_has_to_say_so() -> None:
    model = TorchModule(factory=f"{__name__}:double")
    with pytest.raises(UserError, match=r"of float64, and model\.dtype = float32; set model\.dtype = float64"):
        model.check(labelled())
    model.model_copy(update={"dtype": "float64"}).check(labelled())


def double() -> nn.Module:
    return Curved().double()
