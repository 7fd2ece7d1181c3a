"""FedMD: a whole exchange against torch's own modules and optimiser, local training without it, bits, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn

import narrowcast as nc
from digits import digits, make_task, run
from narrowcast.algorithms.codecs.messages import dense_wire_bits
from narrowcast.algorithms.federated.fedmd import CONSENSUS, CONSENSUS_ROUND, PARAMETERS, STARTED, ClientNetworks, FedMD
from narrowcast.algorithms.local_training.batches import draw_schedule
from narrowcast.experiment import load_experiment
from narrowcast.platform.config.catalog import ALGORITHMS
from narrowcast.platform.contracts import Task
from narrowcast.platform.data.samples import Labelled, Samples
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.factorisation import MatrixFactorisation
from narrowcast.platform.models.networks import CNN, MLP, Softmax, TorchModule
from narrowcast.platform.rounds.evaluation import measure_chunk
from narrowcast.platform.rounds.loop import rounds
from narrowcast.platform.rounds.plan import Plan
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.seeds import PrivateSeed
from narrowcast.platform.types import Arrays, Chunk, LocalTerms
from running import local, sha256

COUNTS = [21, 8, 40, 3, 17, 8, 0, 30]
EVERYONE = np.arange(len(COUNTS))
N_PUBLIC = 50


def with_public(counts: list[int], *, images: bool = False) -> Samples:
    """Digits with public samples that are in no other part."""
    data, pool = digits(counts, images=images), digits([1400], images=images).train
    free = np.setdiff1d(np.arange(1400), data.order)
    return replace(data, public=pool.take(free[:N_PUBLIC]))


def task_of(counts: list[int] | None = None, **training: Any) -> Task:
    return make_task(with_public(counts or COUNTS), MLP(hidden=(16,)), **training)


def parameters_of(algorithm: FedMD, task: Task, clients: Arrays, client: int) -> dict[str, np.ndarray]:
    """What a client's row holds."""
    networks = ClientNetworks.of(algorithm.models, task)
    network = networks.networks[client % len(networks.networks)]
    return {name: each[0] for name, each in networks.unpacked(network, clients[PARAMETERS][client][None]).items()}


def steps(
    module: nn.Module,
    task: Task,
    loss: Any,
    data: Labelled,
    rows: np.ndarray,
    epochs: int,
    key: tuple[PrivateSeed, int, int],
) -> None:
    """Train a module by torch's optimiser on rows of the data, in the order of a client's stream in a round."""
    private_seed, round_index, client = key
    one = np.array([client])
    keys = private_seed.stream_keys("shuffle", round_index, one)
    optimiser = torch.optim.SGD(module.parameters(), task.training.learning_rate)
    schedule = draw_schedule(np.array([len(rows)]), np.array([epochs]), task.training.batch_size, keys)
    for batch, size in zip(schedule.samples, schedule.sizes, strict=True):
        picked = data.take(rows[batch[:size]])
        optimiser.zero_grad()
        loss(module(torch.from_numpy(picked.features)), torch.from_numpy(picked.labels)).backward()
        optimiser.step()


def plain_fedmd(task: Task, models: list[MLP], n_rounds: int, subset: Any) -> tuple[np.ndarray, list[nn.Module]]:
    """Algorithm 1 of the paper, one client after the other: transfer learning, then digest and revisit."""
    private, public = task.private_seed, task.private_seed.successor()
    consensus: Any = None
    modules: list[nn.Module] = []
    for client, model in enumerate(models):
        seed = task.private_seed.stream_keys("initial model", 0, np.array([client]))[0]
        module = model.module(task.data)
        first = model.init_server(task.data, int(seed >> np.uint64(1)))
        module.load_state_dict({name: torch.from_numpy(values) for name, values in first.items()})
        modules.append(module)
    for round_index in range(1, n_rounds + 1):
        for client, module in enumerate(modules):
            rows = task.data.order[task.data.indptr[client] : task.data.indptr[client + 1]]
            own, shared = (private, round_index, client), (public, round_index, client)
            entropy = nn.functional.cross_entropy
            if round_index == 1:
                steps(module, task, entropy, task.data.public, np.arange(N_PUBLIC), 3, shared)
                steps(module, task, entropy, task.data.train, rows, 2, own)
                continue
            taught = Labelled(task.data.public.features[subset(round_index - 1)], consensus)
            steps(module, task, nn.functional.l1_loss, taught, np.arange(len(taught)), 2, shared)
            steps(module, task, entropy, task.data.train, rows, task.training.epochs, own)
        inputs = torch.from_numpy(task.data.public.features[subset(round_index)])
        with torch.no_grad():
            consensus = torch.stack([module(inputs) for module in modules]).mean(0).numpy()
    return consensus, modules


@pytest.mark.parametrize("samples_per_round", [None, 20])
def test_three_rounds_of_two_clients_with_two_architectures_are_those_of_plain_torch(
    samples_per_round: int | None,
) -> None:
    task, models = task_of([21, 34], epochs=1), [MLP(hidden=(16,)), MLP(hidden=(9, 7))]
    algorithm = FedMD(
        models=tuple(models), public_epochs=3, private_epochs=2, digest_epochs=2, samples_per_round=samples_per_round
    )
    rows = {each: algorithm._rows(task, each) for each in (1, 2, 3)}
    if samples_per_round:
        assert len({tuple(each) for each in rows.values()}) == 3
    wanted, modules = plain_fedmd(task, models, 3, rows.get)
    state = run(algorithm, task, n_rounds=3, clients=2, chunk_size=1)
    assert state.server[CONSENSUS_ROUND] == 3
    assert_allclose(state.server[CONSENSUS], wanted, atol=1e-5 * np.abs(wanted).max())
    for client, module in enumerate(modules):
        for name, values in parameters_of(algorithm, task, state.clients, client).items():
            assert_allclose(values, dict(module.named_parameters())[name].detach(), atol=1e-5)


def test_without_digestion_one_client_trains_alone_to_the_bit() -> None:
    task, algorithm = task_of([40], epochs=2), FedMD(digest_epochs=0, public_epochs=0)
    networks = ClientNetworks.of((), task)
    values = networks.unpacked(networks.networks[0], networks.drawn(networks.networks[0], task, np.array([0])))
    for round_index in (1, 2, 3):
        chunk = Chunk(round_index, 0, np.array([0]), {})
        changes = task.training.train(values, chunk, task, LocalTerms(start=values)).changes
        values = {name: each + changes[name] for name, each in values.items()}
    state = run(algorithm, task, n_rounds=3, clients=1)
    for name, got in parameters_of(algorithm, task, state.clients, 0).items():
        assert np.array_equal(got, values[name][0])


def test_without_digestion_no_client_depends_on_another() -> None:
    alone, algorithm = FedMD(digest_epochs=0), FedMD()
    task = task_of()
    other = replace(task, data=replace(task.data, order=np.concatenate([task.data.order[:88], task.data.order[:39]])))
    for each, same in ((alone, True), (algorithm, False)):
        first, second = (run(each, of, n_rounds=2).clients[PARAMETERS] for of in (task, other))
        assert np.array_equal(first[:4], second[:4]) is same


@pytest.mark.parametrize("samples_per_round", [None, 20])
def test_bits_are_outputs_times_classes_times_32_both_ways(samples_per_round: int | None) -> None:
    task, algorithm = task_of(), FedMD(samples_per_round=samples_per_round, models=(MLP(hidden=(5,)), Softmax()))
    header, n_senders = 80, 7  # a header of 64 bits and the number of values; one client has no samples
    sent = header + (samples_per_round or N_PUBLIC) * 10 * 32
    state = run(algorithm, task, n_rounds=4)
    assert dense_wire_bits((samples_per_round or N_PUBLIC) * 10) == sent
    assert state.uplink_bits == 4 * n_senders * sent
    assert state.downlink_bits == 8 * (3 * sent + 72)  # the first message is empty


def test_a_codec_shortens_outputs_and_little_else() -> None:
    task = task_of()
    fine = FedMD(codec=({"kind": "quantise", "levels": 2**12, "scale": "max"}, "entropy"))  # type: ignore[arg-type]
    state, whole = run(fine, task, n_rounds=2), run(FedMD(), task, n_rounds=2)
    assert state.uplink_bits < 0.6 * whole.uplink_bits
    assert_allclose(state.server[CONSENSUS], whole.server[CONSENSUS], atol=0.02 * np.abs(whole.server[CONSENSUS]).max())


@pytest.mark.slow
def test_chunks_change_clients_by_rounding_and_a_resume_changes_nothing() -> None:
    algorithm = FedMD(models=(MLP(hidden=(5,)), Softmax(), MLP(hidden=(4, 3))), samples_per_round=20)
    task = task_of()
    one, some, every = (run(algorithm, task, n_rounds=2, chunk_size=size) for size in (1, 3, 8))
    for other in (some, every):
        assert_allclose(other.clients[PARAMETERS], one.clients[PARAMETERS], atol=2e-6)
        assert_allclose(other.server[CONSENSUS], one.server[CONSENSUS], atol=1e-5)
    plan = Plan(rounds=4, clients_per_round=5, chunk_size=2, checkpoint_every=1)
    these = Run(plan, algorithm, task)
    straight = list(rounds(these, local(algorithm, task)))
    for middle in (1, 2):
        resumed = list(rounds(these, local(algorithm, task), straight[middle - 1].state))
        assert sha256(algorithm, resumed) == sha256(algorithm, straight)


def test_a_client_that_joins_late_begins_with_the_public_samples() -> None:
    task = task_of(epochs=1)
    algorithm = FedMD(public_epochs=4, private_epochs=3, digest_epochs=0)
    server = {CONSENSUS: np.zeros((N_PUBLIC, 10), np.float32), CONSENSUS_ROUND: np.array(4)}
    state = {name: values[[2]] for name, values in algorithm.init_clients(task).items()}
    late = algorithm.train(server, Chunk(5, 0, np.array([2]), state), task)
    assert late.ledger.examples.tolist() == [(3 + 1) * COUNTS[2]]
    again = algorithm.train(server, Chunk(6, 0, np.array([2]), late.state), task)
    assert again.ledger.examples.tolist() == [COUNTS[2]]
    assert late.state[STARTED].all()


def test_a_round_in_which_nobody_delivers_leaves_the_consensus() -> None:
    task, algorithm = task_of(), FedMD()
    server = algorithm.init(task)
    state = algorithm.init_clients(task)
    lost = algorithm.train(server, Chunk(1, 0, EVERYONE, state, lost=np.ones(8, bool)), task)
    after = algorithm.step(server, server, algorithm.fold([lost.partial]), task, 1)
    assert after[CONSENSUS_ROUND] == 0
    assert lost.ledger.uplink_bits.any()
    # what clients learnt stays with them, and without a consensus they go on alone
    second = algorithm.train(after, Chunk(2, 0, EVERYONE, lost.state), task)
    assert second.ledger.examples.tolist() == COUNTS


def test_each_client_is_measured_with_its_own_network() -> None:
    task, models = task_of(), (MLP(hidden=(5,)), Softmax())
    algorithm = FedMD(models=models)
    plan = Plan(rounds=2, clients_per_round=8, evaluate_clients=("test",))
    state = run(algorithm, task, n_rounds=2)
    everyone = {name: np.zeros((8, *values.shape[1:]), values.dtype) for name, values in state.clients.items()}
    for name, values in state.clients.items():
        everyone[name][state.participants] = values
    broadcast = algorithm.broadcast(state.server, task, 3).arrays
    found = measure_chunk(Run(plan, algorithm, task), broadcast, Chunk(2, 0, EVERYONE, everyone), ["test"]).metrics
    rows, counts = task.data.of_clients("test").rows(EVERYONE)
    for client, own in enumerate(np.split(rows, np.cumsum(counts)[:-1])):
        model = models[client % 2]
        module = model.loaded(parameters_of(algorithm, task, everyone, client), task.data)
        picked = task.data.test.take(own)
        right = module(torch.from_numpy(picked.features)).argmax(1).numpy() == picked.labels
        if len(own):
            assert found["test.accuracy"][client] == right.mean()
        else:
            assert np.isnan(found["test.accuracy"][client])


def test_networks_follow_the_speed_of_devices_and_weigh_on_the_clock() -> None:
    task, models = task_of(epochs=2), (Softmax(), MLP(hidden=(8,)), MLP(hidden=(16,)))
    speeds = np.array([1.0, 0.01, 0.55, 0.7, 2.0, 0.4, 1.0, 0.61])
    task = replace(task, profiles=replace(task.profiles, compute_speed=speeds))
    algorithm = FedMD(models=models, assignment="compute", public_epochs=3, digest_epochs=2)
    work = np.array([640, 64 * 8 + 80, 64 * 16 + 160]) / (64 * 16 + 160)
    assigned = algorithm._assigned(task, EVERYONE)
    assert assigned.tolist() == [2, 1, 0, 0, 2, 1, 2, 0]
    first = algorithm.broadcast(algorithm.init(task), task, 1).arrays
    sized = np.maximum(2 * np.array(COUNTS), 1)
    assert_allclose(algorithm.relative_work(first, task, EVERYONE), work[assigned] * (1 + 3 * N_PUBLIC / sized))
    later = {**first, CONSENSUS_ROUND: np.array(1)}
    assert_allclose(algorithm.relative_work(later, task, EVERYONE), work[assigned] * (1 + 2 * N_PUBLIC / sized))


def test_float64_and_convolutions() -> None:
    data = with_public([10, 12], images=True)
    task = make_task(data, CNN(channels=(2, 3), hidden=8, dtype="float64"))
    algorithm = FedMD(models=(CNN(channels=(2, 3), hidden=8), Softmax()))
    state = run(algorithm, task, n_rounds=2, clients=2)
    assert state.server[CONSENSUS].dtype == state.clients[PARAMETERS].dtype == np.float64
    assert state.uplink_bits == 2 * 2 * (80 + 64 * N_PUBLIC * 10)


def seven() -> nn.Module:
    """A network of seven outputs."""
    return nn.Linear(64, 7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"models": (MLP(), TorchModule(factory="test_fedmd:seven"))},
            r"^algorithm.models\[1\]: model.factory = test_fedmd:seven returns \[2, 7\], expected scores \[n, 10\]$",
        ),
        (
            {"models": (MatrixFactorisation(),)},
            r"^algorithm.models\[0\].kind = matrix_factorisation: .* use a network with the 10 outputs of the others",
        ),
        ({"models": (MLP(dtype="float64"),)}, r"^algorithm.models\[0\].dtype: clients of fedmd share it; set model"),
        ({"samples_per_round": 51}, "samples_per_round = 51: there are 50 public samples; use at most"),
        ({"codec": ["error_feedback", {"kind": "top_k", "fraction": 0.1}]}, "keeps state between rounds.*leave it out"),
        ({"digest_loss": "cross_entropy"}, "digest_loss = cross_entropy takes no outputs as targets; use absolute"),
    ],
)
def test_refused_in_one_line(fields: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        FedMD.model_validate(fields).check(task_of())
    assert "\n" not in str(refused.value)


def test_what_else_does_not_fit_is_refused() -> None:
    task = task_of()
    with pytest.raises(UserError, match=r"needs samples that all clients hold; give data\.public"):
        FedMD().check(replace(task, data=replace(task.data, public=None)))
    with pytest.raises(UserError, match="leave start_from out"):
        FedMD().check(replace(task, start=task.initial_parameters()))
    with pytest.raises(UserError, match="trains networks on samples, not matrix_factorisation"):
        FedMD().check(replace(task, model=MatrixFactorisation()))
    settings = ["data={kind: digits, public: {samples: 100}}", "algorithm=fedmd"]
    for more, message in (
        ([], "has no global model to evaluate; set evaluate_clients = test"),
        (["evaluate_clients=test", "schedule=buffered"], "fedmd as set here cannot count stale updates less"),
        (
            ["evaluate_clients=test", "sampling=uniform", "replacement=true"],
            "fedmd as set here counts every client once",
        ),
        (["evaluate_clients=test", "secure=masked"], "fedmd"),
    ):
        with pytest.raises(UserError, match=message) as refused:
            experiment = load_experiment("fedavg-digits", [*settings, *more])
            experiment.task(experiment.data_source.load())
        assert "\n" not in str(refused.value)


def test_it_is_found_by_its_kind_with_nested_models_and_losses() -> None:
    written = FedMD(models=(MLP(hidden=(3,)), Softmax()), digest_loss="squared_error")  # type: ignore[arg-type]
    assert ALGORITHMS["fedmd"].model_validate_json(written.model_dump_json()) == written


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
def test_a_recorded_run_has_the_consensus_and_what_clients_measure_and_no_model(tmp_path: Path) -> None:
    data = {"kind": "digits", "clients": 6, "public": {"samples": 30}}
    settings = {"data": data, "algorithm": "fedmd", "clients_per_round": 6, "rounds": 2, "evaluate_clients": "test"}
    result = nc.run("fedavg-digits", settings, backend="local", output=tmp_path, progress=False)
    labels = dict(result.summary())
    assert labels["test accuracy of clients' own models"].endswith("(6 clients)")
    assert "test accuracy" not in labels
    assert {name: values.shape for name, values in result.arrays().items()} == {CONSENSUS: (30, 10)}
    with pytest.raises(UserError, match="clients of fedmd have models of their own"):
        result.model()
