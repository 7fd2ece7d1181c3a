"""FedMatch: steps of a plain reference with helpers, FedAvg in it, who helps whom, differences alone, and bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax, one_hot, softmax

from narrowcast.algorithms.client.sums import TENSORS
from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.messages import CodedTensors, dense_wire_bits
from narrowcast.algorithms.codecs.sparsify import Threshold
from narrowcast.algorithms.codecs.wire import varint, write_indices
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedmatch import (
    _CLIENTS,
    _HELPERS,
    _KNOWN,
    _SIGMAS,
    PSI,
    FedMatch,
    added_up,
    patched,
)
from narrowcast.algorithms.local_training.sgd import SGD
from narrowcast.laws.small_tasks import PLAN, run, samples, task_on
from narrowcast.platform.contracts import Recipients, Task
from narrowcast.platform.data.samples import Samples, one_array
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import MLP, Softmax
from narrowcast.platform.seeds import generator
from narrowcast.platform.types import Arrays, Chunk

COUNTS = np.array([5, 9, 0, 3])
STILL = {"shift": 0, "operations": 0, "cutout": 0}
RATE, STEPS, SURE = 0.02, 3, 0.5
VALUES = 3 * 64 + 3


def task(execution: Any = "auto", *, labels: bool = True) -> Task:
    data = samples(COUNTS)
    if not labels:
        assert data.server is not None
        nobody = np.zeros(0, dtype=np.int64)
        data = replace(data, train=data.server, order=nobody, indptr=np.zeros(5, dtype=np.int64))
    training = SGD(batch_size="all", learning_rate=RATE, epochs=STEPS, execution=execution)
    return task_on(data, Softmax(), training=training)


def fedmatch(**fields: Any) -> FedMatch:
    factors = {"agreement": 0.3, "inter_client": 0.7, "l1": 0.01, "l2": 2.0, "threshold": SURE}
    return FedMatch.model_validate({**factors, "views": STILL, "helpers_every": 1, **fields})


def heard(algorithm: FedMatch, given: Task) -> Arrays:
    """Return a server state in which all clients but the third have sent a psi."""
    state, random = dict(algorithm.init(given)), np.random.default_rng(3)
    drawn = {name: random.standard_normal(values.shape) / 10 for name, values in _CLIENTS.of(state).items()}
    known = np.arange(len(COUNTS)) != 2
    return {**state, **_CLIENTS.add({n: x.astype(np.float32) for n, x in drawn.items()}), _KNOWN: known}


def change(algorithm: FedMatch, given: Task, server: Arrays, client: int) -> Arrays:
    sent = algorithm.broadcast(server, given, 2).arrays
    result = algorithm.train(sent, Chunk(2, 0, np.array([client]), {}), given)
    return TENSORS.of(result.partial)


def inputs(features: Any) -> torch.Tensor:
    return torch.from_numpy(one_array(features).astype(np.float32) / 255).flatten(1)


def reference(algorithm: FedMatch, given: Task, server: Arrays, client: int, helpers: list[int]) -> Arrays:
    """Return a client's changes of sigma and psi by autograd, on all of its samples in each step."""
    data: Samples = given.data
    assert data.unlabelled is not None
    names = list(given.initial_parameters())
    start = {name: torch.from_numpy(np.array(server[name])) for name in (*names, *map(PSI.name, names))}
    sigma = [start[name].clone().requires_grad_() for name in names]
    psi = [start[PSI.name(name)].clone().requires_grad_() for name in names]
    of_helpers = [[torch.from_numpy(_CLIENTS.of(server)[name][other]) for name in names] for other in helpers]
    rows = data.order[data.indptr[client] : data.indptr[client + 1]]
    unlabelled = data.unlabelled
    u = inputs(unlabelled.features)[unlabelled.order[unlabelled.indptr[client] : unlabelled.indptr[client + 1]]]

    def outputs(x: torch.Tensor, part: Any) -> torch.Tensor:
        weight, bias = (a + b for a, b in zip(sigma, part, strict=True))
        return x @ weight.T + bias

    def descend(parts: list[torch.Tensor], loss: torch.Tensor) -> None:
        slopes = torch.autograd.grad(loss, parts)
        with torch.no_grad():
            for part, slope in zip(parts, slopes, strict=True):
                part.sub_(slope, alpha=RATE)

    for _ in range(STEPS):
        if len(rows):
            labels = torch.from_numpy(data.train.labels[rows])
            descend(
                sigma, algorithm.supervised * cross_entropy(outputs(inputs(data.train.features)[rows], psi), labels)
            )
        if not len(u):
            continue
        seen = softmax(outputs(u, psi), 1).max(1)[0] >= SURE
        z, votes = outputs(u[seen], psi), torch.zeros(int(seen.sum()), 3)
        theirs = [softmax(outputs(u[seen], part).detach(), 1) for part in of_helpers]
        for p in [softmax(z, 1), *theirs]:
            votes += one_hot(p.argmax(1), 3)
        loss = algorithm.agreement * cross_entropy(z, votes.argmax(1)) if seen.any() else torch.zeros(())
        for p in theirs if seen.any() else []:
            loss = loss + algorithm.inter_client / len(theirs) * kl_div(log_softmax(z, 1), p, reduction="batchmean")
        for a, b in zip(sigma, psi, strict=True):
            loss = loss + algorithm.l1 * b.abs().sum() + algorithm.l2 * (a.detach() - b).square().sum()
        descend(psi, loss)
    parts = dict(zip((*names, *map(PSI.name, names)), (*sigma, *psi), strict=True))
    return {name: (values.detach() - start[name]).numpy() for name, values in parts.items()}


@pytest.mark.parametrize("execution", ["batched", "per_client"])
@pytest.mark.parametrize("labels", [True, False])
def test_steps_are_those_of_both_losses_with_helpers(labels: bool, execution: Any) -> None:
    given, algorithm = task(execution, labels=labels), fedmatch()
    server = heard(algorithm, given)
    helpers = algorithm.broadcast(server, given, 2).arrays[_HELPERS]
    for client in np.flatnonzero(given.data.examples):
        got = change(algorithm, given, server, int(client))
        wanted = reference(algorithm, given, server, int(client), helpers[client].tolist())
        assert got.keys() == (wanted.keys() if labels else PSI.add(PSI.of(wanted)).keys())
        for name, values in got.items():
            np.testing.assert_allclose(values, wanted[name], rtol=1e-4, atol=1e-6)


def test_without_its_terms_it_is_fedavg_on_the_labels() -> None:
    given = task_on(samples(np.arange(11)), MLP(hidden=(6,)), training=SGD(batch_size=4))
    off = {"psi": 0, "agreement": 0, "inter_client": 0, "l1": 0, "l2": 0, "supervised": 1, "weights": "examples"}
    plan, models = PLAN.model_copy(update={"rounds": 3}), []
    for algorithm in (FedAvg(), fedmatch(**off, helpers=0)):
        state = run(plan, algorithm, given)[-1].state
        assert state is not None
        models.append(algorithm.final(state.server))
    for name, values in models[0].items():  # gradients by autograd round unlike those in closed form
        np.testing.assert_allclose(models[1][name], values, rtol=1e-5, atol=1e-6)


def test_psi_of_helpers_counts_by_their_terms_alone() -> None:
    given, client = task(), 0
    for factors, equal in (({"agreement": 0, "inter_client": 0}, True), ({}, False)):
        alone, helped = fedmatch(helpers=0, **factors), fedmatch(**factors)
        one = change(alone, given, alone.init(given), client)
        other = change(helped, given, heard(helped, given), client)
        assert all(np.array_equal(one[name], other[name]) for name in one) == equal


def test_the_server_as_a_client_that_joins_has_no_helpers_and_holds_nothing() -> None:
    given = task()
    helped, alone = (fedmatch(**fields) for fields in ({"download_threshold": 0.1}, {"helpers": 0}))
    server = heard(helped, given)
    sent = helped.broadcast(server, given, 1).arrays
    assert _HELPERS in sent
    expected = alone.reference(alone.init(given), given, 1)
    assert all(np.array_equal(values, expected[name]) for name, values in helped.reference(sent, given, 1).items())


def test_without_sure_predictions_psi_goes_to_sigma() -> None:
    given, algorithm = task(labels=False), fedmatch(threshold=1, l1=0, helpers=0)
    start = algorithm.init(given)
    left = (1 - 2 * algorithm.l2 * RATE) ** STEPS
    for name, moved in PSI.of(change(algorithm, given, start, 2)).items():
        np.testing.assert_allclose(moved, (1 - left) * (start[name] - start[PSI.name(name)]), rtol=1e-4, atol=1e-7)


def test_helpers_are_the_nearest_of_the_others_by_their_outputs() -> None:
    given, algorithm = task(), fedmatch(probes=2)
    server = heard(algorithm, given)
    u = torch.from_numpy(generator(0, "probes").standard_normal((2, 1, 8, 8), dtype=np.float32)).flatten(1)
    model = {name: values for name, values in server.items() if not name.startswith("optimizer/")}
    points = []
    for client in range(4):
        psi = PSI.of(model) if client == 2 else {name: x[client] for name, x in _CLIENTS.of(server).items()}
        weight, bias = map(torch.from_numpy, added_up({**model, **PSI.add(psi)}).values())
        points.append(softmax(u @ weight.T + bias, 1).flatten().numpy())
    for client, helpers in enumerate(algorithm.broadcast(server, given, 1).arrays[_HELPERS]):
        by_distance = sorted(
            {0, 1, 3} - {client}, key=lambda other: float(np.sum((points[other] - points[client]) ** 2))
        )
        assert helpers.tolist() == by_distance[:2]


def test_bits_are_those_of_both_parts_and_of_helpers() -> None:
    given, algorithm, clients = task(), fedmatch(helpers_every=2), np.array([0, 1])
    server, recipients = heard(algorithm, given), Recipients(np.array([0, 1]), np.array([0, 1]), 3)
    for round_index, helpers in ((3, 2), (4, 0)):
        sent = algorithm.broadcast(server, given, round_index)
        bits = algorithm.download_bits(server, sent, given, recipients)
        whole = dense_wire_bits(2 * VALUES)
        assert sent.full.wire_bits() == whole
        assert [whole] * 2 == (bits - 2 * dense_wire_bits(VALUES)).tolist() if helpers else bits is None
        work = algorithm.relative_work(sent.arrays, given, clients)
        of_one = 4 / 3 + helpers / 3 + (1 if helpers else 0)
        others = np.minimum(10 * 9, given.data.unlabelled.examples[clients])
        np.testing.assert_allclose(work, 1 + of_one * others / [5, 9])
    assert algorithm.upload_bits(server, given, clients).tolist() == [dense_wire_bits(2 * VALUES)] * 2
    without = task(labels=False)
    assert algorithm.upload_bits(server, without, clients).tolist() == [dense_wire_bits(VALUES), 0]


@pytest.mark.parametrize("labels", [True, False])
def test_all_differences_are_whole_messages_bit_for_bit(labels: bool) -> None:
    given, ends = task(labels=labels), []
    sparse = {"codec": [{"kind": "threshold", "magnitude": 0}], "download_threshold": 0}
    for fields in ({}, sparse):
        outcomes = run(PLAN, fedmatch(helpers_every=2, **fields), given)
        assert outcomes[-1].state is not None
        ends.append(outcomes[-1].state.server)
    whole, patches = ends
    assert all(np.array_equal(values, patches[name]) for name, values in whole.items())
    assert patches.keys() - whole.keys() == _SIGMAS.add(added_up(whole)).keys()


UP, DOWN = 0.004, 0.02


def held_by_all(algorithm: FedMatch, given: Task) -> Arrays:
    """Return the state of `heard`, in which clients hold a sigma near the server's too."""
    state, random = heard(algorithm, given), np.random.default_rng(4)
    near = {name: state[name] + random.standard_normal(x.shape) * DOWN for name, x in _SIGMAS.of(state).items()}
    psi = {name: state[PSI.name(name)] + random.standard_normal(x.shape) * DOWN for name, x in near.items()}
    kept = {**_SIGMAS.add(near), **_CLIENTS.add(psi)}
    return {**state, **{name: values.astype(np.float32) for name, values in kept.items()}}


@pytest.mark.parametrize("labels", [True, False])
def test_a_round_of_differences_is_that_of_a_plain_reference(labels: bool) -> None:
    given = task(labels=labels)
    algorithm = fedmatch(helpers=0, codec=[{"kind": "threshold", "magnitude": UP}], download_threshold=DOWN)
    server = held_by_all(algorithm, given)
    names = list(given.initial_parameters())
    own = {**_SIGMAS.of(server), **PSI.add(_CLIENTS.of(server))}
    sent, clients = algorithm.broadcast(server, given, 2), np.flatnonzero(given.data.examples)
    partial = algorithm.train(sent.arrays, Chunk(2, 0, clients, {}), given).partial
    after, changes = algorithm.step(server, sent.arrays, partial, given, 2), []
    for client in clients:
        start = {name: np.array(server[name]) for name in own}
        for name, values in start.items():
            for place in np.ndindex(values.shape):
                if client != 2 and abs(values[place] - own[name][client][place]) <= DOWN:
                    values[place] = own[name][client][place]
        moved = reference(algorithm, given, {**server, **start}, int(client), [])
        cut = {name: np.where(np.abs(values) > UP, values, 0) for name, values in moved.items()}
        cut = {name: values if labels or name.startswith("psi/") else 0 * values for name, values in cut.items()}
        assert any((values != 0).any() and (values == 0).any() for values in cut.values())
        changes.append(cut)
        for name in names:
            kept = (_SIGMAS.of(after)[name][client], _CLIENTS.of(after)[name][client])
            for got, part in zip(kept, (name, PSI.name(name)), strict=True):
                np.testing.assert_allclose(got, start[part] + cut[part], rtol=1e-4, atol=1e-6)
    for name in own if labels else PSI.add(PSI.of(own)):
        mean = np.mean([change[name] for change in changes], axis=0)
        np.testing.assert_allclose(after[name], server[name] + mean, rtol=1e-4, atol=1e-6)


def sparse_bits(kept: np.ndarray) -> int:
    """Return the bits of a message of the values that are True: header, their number, indices, and 32 bits each."""
    places = np.flatnonzero(kept)
    return 64 + 8 * len(varint(len(places)) + write_indices(places, len(kept), "smallest")) + 32 * len(places)


def test_bits_of_differences_are_those_of_values_and_indices() -> None:
    given = task()
    algorithm = fedmatch(codec=[{"kind": "threshold", "magnitude": UP}], download_threshold=DOWN)
    server = held_by_all(algorithm, given)
    sent, clients = algorithm.broadcast(server, given, 1), np.array([0, 2])
    bits = algorithm.download_bits(server, sent, given, Recipients(clients, clients, 3))
    assert bits is not None

    def differs(ours: Arrays, theirs: Arrays) -> int:
        apart = [np.abs(np.asarray(ours[name]) - theirs[name]).ravel() > DOWN for name in sorted(ours)]
        return min(sparse_bits(np.concatenate(apart)), dense_wire_bits(len(np.concatenate(apart))))

    own = {**_SIGMAS.of(server), **PSI.add(_CLIENTS.of(server))}
    model = {name: server[name] for name in own}
    theirs = {name: values[0] for name, values in own.items()}
    psi = PSI.of({name: np.where(np.abs(model[name] - x) > DOWN, model[name], x) for name, x in theirs.items()})
    helpers = sent.arrays[_HELPERS]
    of_clients = [{name: values[client] for name, values in _CLIENTS.of(server).items()} for client in range(4)]
    assert bits[0] == differs(model, theirs) + sum(differs(of_clients[helper], psi) for helper in helpers[0])
    newcomer = sum(differs(of_clients[helper], PSI.of(model)) for helper in helpers[2])
    assert bits[1] == dense_wire_bits(2 * VALUES) + newcomer
    ledger = algorithm.train(sent.arrays, Chunk(1, 0, np.array([0]), {}), given).ledger
    moved = change(algorithm, given, server, 0)
    arrived = np.concatenate([moved[name].ravel() != 0 for name in sorted(moved)])
    assert ledger.uplink_bits.tolist() == [sparse_bits(arrived)]


def test_a_patch_is_a_message_of_the_codec_of_its_name() -> None:
    random = np.random.default_rng(0)
    held = {"b": random.standard_normal(40).astype(np.float32), "a": np.zeros((3, 50), np.float32)}
    sent = {name: values + (random.random(values.shape) < 0.1).astype(np.float32) for name, values in held.items()}
    got, bits = patched(sent, held, 0.5)
    assert all(np.array_equal(got[name], sent[name]) for name in sent)
    kept = {name: np.where(sent[name] == held[name], 0, sent[name]) for name in sent}
    assert bits == CodedTensors(0, 0, Codec((Threshold(),)).encode(kept, 0).data).wire_bits()
    everything, most = patched(sent, {name: values + 2 for name, values in sent.items()}, 0.5)
    assert (most, everything["b"].tolist()) == (dense_wire_bits(190), sent["b"].tolist())


@pytest.mark.parametrize(
    ("fields", "training", "message"),
    [
        ({}, {"momentum": 0.5}, r"^algorithm\.kind = fedmatch trains two sets .*, without momentum and clipping"),
        ({"download": {"step": 0.1}, "download_threshold": 0.1}, {}, r"^algorithm\.download and .* leave out one$"),
        ({"l2": 60}, {}, r"^algorithm\.l2 = 60 with training\.learning_rate = 0\.02: a step takes psi past sigma"),
    ],
)
def test_what_it_cannot_train_is_refused_in_one_line(fields: Any, training: Any, message: str) -> None:
    given = task()
    given = replace(given, training=given.training.model_copy(update=training))
    with pytest.raises(UserError, match=message):
        fedmatch(**fields).check(given)
