"""The algorithms of docs/examples, each one file outside the package: their laws on a network, and a run on digits."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from digits import digits, make_task, plain_client, relative_error, run
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.extend import PartlyShared
from narrowcast.laws import algorithm_cases
from narrowcast.laws.law import evaluate_laws
from narrowcast.laws.registries import LAWS
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.networks import MLP
from narrowcast.platform.rounds.evaluation import model_sha256
from sampling import sampled

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
NAMES = {"ditto": "Ditto", "fedrep": "FedRep", "dp_fedavg": "DPFedAvg", "sign_flip": "SignFlip"}


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def example(module: str, **fields: Any) -> Any:
    return getattr(importlib.import_module(module), NAMES[module])(**fields)


@pytest.mark.slow
@pytest.mark.parametrize("module", sampled(NAMES, {"fedrep", "dp_fedavg"}))
def test_it_keeps_the_laws_of_algorithms_on_a_network(module: str) -> None:
    variants = algorithm_cases.variants(example(module))
    cases = {
        label: algorithm_cases.AlgorithmCase(variant, MLP(hidden=(16,)))
        for label, variant in variants.items()
        if label in ("float32", "feedback")
    }
    broken = {verdict.law: verdict.reason for verdict in evaluate_laws(LAWS["algorithm"].laws, cases) if verdict.reason}
    assert not broken


def test_dittos_global_model_is_fedavgs_and_its_own_models_take_proximal_steps() -> None:
    algorithm, task = example("ditto", nearness=0.5), make_task(digits([40, 33, 20]), learning_rate=0.2)
    state, start = run(algorithm, task, clients=3), algorithm.init(task)
    assert relative_error(algorithm.final(state.server), run(FedAvg(), task, clients=3).server) < 1e-5
    for client in range(3):
        own = {name: state.clients[f"personal/{name}"][client] + start[name] for name in start}
        assert relative_error(own, plain_client(task, start, client, mu=0.5)) < 1e-5


def test_fedrep_sends_the_body_and_keeps_heads() -> None:
    algorithm, task = example("fedrep", head_steps=3), make_task(digits([40] * 6), learning_rate=0.2)
    before, state = algorithm.final(algorithm.init(task)), run(algorithm, task, clients=6)
    body = sum(values.size for name, values in before.items() if not name.startswith("3."))
    whole = sum(values.size for values in before.values())
    fedavg = run(FedAvg(), task, clients=6)
    assert fedavg.uplink_bits - state.uplink_bits == 6 * 32 * (whole - body)
    assert fedavg.downlink_bits - state.downlink_bits == 6 * 32 * (whole - body)
    assert set(state.clients) == {"personal/3.weight", "personal/3.bias"}
    after = algorithm.final(state.server)
    moved = {name for name in before if not np.array_equal(after[name], before[name])}
    assert moved == {"1.weight", "1.bias"}
    heads = state.clients["personal/3.bias"]
    assert len(np.unique(heads, axis=0)) == 6


def test_with_nothing_kept_partly_shared_is_fedavg_bit_for_bit() -> None:
    class Shared(PartlyShared):
        kind: str = "shared"

        def keeps(self, name: str) -> bool:
            return False

    task = make_task(digits([40, 33, 20]))
    got, wanted = (run(algorithm, task, n_rounds=3, clients=3) for algorithm in (Shared(), FedAvg()))
    assert model_sha256(Shared(), got) == model_sha256(FedAvg(), wanted)
    assert got.uplink_bits == wanted.uplink_bits


def test_sharing_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="clients keep all of mlp; share some of it"):
        example("fedrep", head="").check(make_task(digits([8])))


def test_attackers_send_the_opposite_and_pay_what_all_do() -> None:
    task = make_task(digits([40, 33, 20]))
    honest, idle, attacked = (
        run(algorithm, task, clients=3)
        for algorithm in (FedAvg(), example("sign_flip", attackers=0), example("sign_flip", attackers=1, scale=2.0))
    )
    assert model_sha256(FedAvg(), honest) == model_sha256(FedAvg(), idle)
    assert attacked.uplink_bits == honest.uplink_bits
    start = task.initial_parameters()
    models = [plain_client(task, start, client) for client in range(3)]
    wanted = {
        name: value
        + (
            -2 * 40 * (models[0][name] - value)
            + sum(n * (m[name] - value) for n, m in ((33, models[1]), (20, models[2])))
        )
        / 93
        for name, value in start.items()
    }
    assert relative_error(attacked.server, wanted) < 1e-5


def test_attackers_of_item_rows_keep_the_laws_of_algorithms() -> None:
    attacked = importlib.import_module("sign_flip").SignFlipRows(rank=4)
    cases = {"float32": algorithm_cases.AlgorithmCase(attacked, algorithm_cases.MODELS["matrix_factorisation"])}
    broken = {verdict.law: verdict.reason for verdict in evaluate_laws(LAWS["algorithm"].laws, cases) if verdict.reason}
    assert not broken


@pytest.mark.parametrize("expected", [None, 6.0])
def test_the_private_mean_is_clipped_and_over_a_fixed_divisor(expected: float | None) -> None:
    task = make_task(digits([40, 33, 20]))
    start = task.initial_parameters()
    models = [plain_client(task, start, client) for client in range(3)]
    norms = [np.sqrt(sum(np.square(m[name] - start[name]).sum() for name in start)) for m in models]
    clip = float(np.median(norms))
    factors = [min(1.0, clip / norm) for norm in norms]
    assert sum(factor < 1 for factor in factors) == 1
    privacy = {"clip": clip, "noise_multiplier": 0.0, "expected_clients": expected}
    got = run(example("dp_fedavg", privacy=privacy), task, clients=3)
    wanted = {
        name: value + sum(f * (m[name] - value) for f, m in zip(factors, models, strict=True)) / (expected or 3)
        for name, value in start.items()
    }
    assert relative_error(got.server, wanted) < 1e-5
    noisy = run(example("dp_fedavg", privacy={**privacy, "noise_multiplier": 0.5}), task, clients=3)
    noise = np.concatenate([(noisy.server[name] - got.server[name]).ravel() for name in start]) * (expected or 3)
    assert len(noise) > 1000
    assert noise.std() == pytest.approx(0.5 * clip, rel=0.1)
    assert abs(noise.mean()) < 4 * 0.5 * clip / np.sqrt(len(noise))
