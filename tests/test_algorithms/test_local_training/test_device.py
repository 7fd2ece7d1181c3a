"""Local training on a GPU: the steps of a CPU, to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from digits import digits, make_task, relative_error, run
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedmatch import FedMatch
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.low_rank import CoLR, SCoLR
from narrowcast.algorithms.federated.scaffold import Scaffold
from narrowcast.algorithms.federated.semi_supervised import SemiSupervised
from narrowcast.algorithms.local_training.factorisation import FactorisationSGD
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.experiment import load_experiment
from narrowcast.laws.small_tasks import samples, task_on
from narrowcast.platform.contracts import Algorithm
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import CNN, MLP, Softmax
from narrowcast.platform.models.neural_network import NeuralNetwork
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run, start
from narrowcast.platform.types import Arrays
from per_client import make_task as make_factorisation
from per_client import synthetic

TOLERANCE = 1e-4
"""What rounding may make of three rounds: relative to a tensor's largest entry."""
COUNTS = [21, 8, 40, 3, 17, 8, 0, 30]

TRIGGER = ("attack=trigger", "attack.target=0", "attack.share=0.2", "attack.size=2")
METHODS = {
    "fedprox": ("algorithm=fedprox", "algorithm.mu=0.1"),
    "fednova": ("algorithm=fednova",),
    "feddyn": ("algorithm=feddyn", "algorithm.alpha=0.1"),
    "local": ("algorithm=local", "data.validation_share=0.2", "evaluate_clients=validation"),
    "ditto": ("algorithm=ditto",),
    "apfl": ("algorithm=apfl", "algorithm.alpha_rate=0.1"),
    "pfedme": ("algorithm=pfedme",),
    "per_fedavg": ("algorithm=per_fedavg",),
    "partial": ("algorithm=partial", "algorithm.kept=head"),
    "d_psgd": ("algorithm=d_psgd", "algorithm.topology=ring"),
    "choco_sgd": ("algorithm=choco_sgd", "algorithm.topology=torus"),
    "dcd_psgd": ("algorithm=dcd_psgd", "algorithm.topology=torus"),
    "push_sum": ("algorithm=push_sum", "algorithm.topology=ring", "algorithm.topology.direction=forward"),
    "ring": ("algorithm=server_free", "algorithm.exchange=ring"),
    "dynamic_averaging": ("algorithm=dynamic_averaging", "algorithm.threshold=0.1"),
    "rfa": ("algorithm.aggregator=geometric_median",),
    "fltrust": ("algorithm.aggregator=fltrust", "data.server.samples=50"),
    "constrain-and-scale": (*TRIGGER, "attack.pull=0.1"),
    "projected": (*TRIGGER, "attack.radius=0.5"),
    "edge_case": ("attack=edge_case", "attack.edges=digits", "attack.target=0"),
}


def parameters(algorithm: Algorithm, task: Any) -> Arrays:
    return algorithm.final(run(algorithm, task, n_rounds=3).server)


@pytest.mark.cuda
@pytest.mark.parametrize("algorithm", [FedAvg(), Scaffold(), CoLR(rank=3), SCoLR(rank=4)], ids=lambda each: each.kind)
@pytest.mark.parametrize("model", [MLP(hidden=(16,)), CNN(channels=(4, 8), hidden=16)], ids=lambda each: each.kind)
def test_networks_train_on_a_gpu_as_on_a_cpu(algorithm: Algorithm, model: NeuralNetwork) -> None:
    data = digits(COUNTS, images=model.kind == "cnn")  # type: ignore[attr-defined]
    on_cpu, on_cuda = (make_task(data, model, device=device, momentum=0.5, epochs=2) for device in ("cpu", "cuda"))
    assert relative_error(parameters(algorithm, on_cuda), parameters(algorithm, on_cpu)) < TOLERANCE


@pytest.mark.cuda
@pytest.mark.parametrize("algorithm", [FedMF(), CoLR(rank=3), SCoLR(rank=4), FedAvg()], ids=lambda each: each.kind)
def test_factorisations_train_on_a_gpu_as_on_a_cpu(algorithm: Algorithm) -> None:
    on_cpu, on_cuda = (make_factorisation(synthetic([3, 9, 4, 14, 6]), device=device) for device in ("cpu", "cuda"))
    assert relative_error(parameters(algorithm, on_cuda), parameters(algorithm, on_cpu)) < TOLERANCE


@pytest.mark.cuda
@pytest.mark.parametrize("changes", METHODS.values(), ids=METHODS)
def test_methods_give_server_and_clients_the_same_on_a_gpu(changes: tuple[str, ...]) -> None:
    def state(device: str) -> Arrays:
        sizes = ("rounds=3", "data.clients=16", "clients_per_round=16")
        experiment = load_experiment("fedavg-digits", [*sizes, *changes, f"training.device={device}"])
        run = Run(experiment, experiment.algorithm, experiment.task(experiment.data_source.load()))
        *_, last = LocalBackend().run(run, start(run))
        assert last.state is not None
        clients = {f"client/{name}": values for name, values in last.state.clients.items()}
        return {name: values for name, values in {**last.state.server, **clients}.items() if np.any(values)}

    assert relative_error(state("cpu"), state("cpu")) < TOLERANCE


@pytest.mark.cuda
@pytest.mark.parametrize(
    "algorithm",
    [
        SemiSupervised.model_validate({"consistency": {"kind": "fixmatch", "threshold": 0.3}}),
        SemiSupervised.model_validate({"consistency": {"kind": "uda", "threshold": 0.3}}),
        FedMatch(supervised=1, agreement=1, inter_client=1, l2=1, threshold=0.3, helpers_every=1),
    ],
    ids=["fixmatch", "uda", "fedmatch"],
)
def test_samples_without_labels_train_on_a_gpu_as_on_a_cpu(algorithm: Algorithm) -> None:
    on_cpu, on_cuda = (
        task_on(samples(np.array(COUNTS)), Softmax(), training=SGD(learning_rate=0.1, batch_size=8, device=device))
        for device in ("cpu", "cuda")
    )
    assert relative_error(parameters(algorithm, on_cuda), parameters(algorithm, on_cpu)) < TOLERANCE


def test_a_gpu_batches_what_a_cpu_trains_one_by_one() -> None:
    data = digits(COUNTS, images=True)
    assert make_task(data, CNN(hidden=16)).training.mode(make_task(data, CNN(hidden=16))) == "per_client"
    task = make_task(data, CNN(hidden=16), device="cuda")
    assert task.training.mode(task) == "batched"


def test_compiled_loops_are_for_a_cpu() -> None:
    assert FactorisationSGD().fused
    assert not FactorisationSGD(device="cuda").fused
    with pytest.raises(UserError, match='"fused" runs on a CPU; use batched, or device: cpu'):
        FactorisationSGD(device="cuda", program="fused").check(make_factorisation(synthetic([3, 9])))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_missing_gpu_is_one_line() -> None:
    task = make_task(digits(COUNTS), device="cuda")
    with pytest.raises(UserError, match="this machine has no CUDA device; use cpu, or another machine"):
        LocalBackend().check(Run(Plan(), FedAvg(), task))
