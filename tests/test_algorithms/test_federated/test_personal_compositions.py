"""Personal methods with codecs, channels, secure sums, aggregators, schedules, resumed runs and studies.

Each works, or is refused in one line. Actors of Ray, one of which is killed, are in `test_killed_actors`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import narrowcast as nc
from narrowcast.experiment import Experiment, build_experiment
from narrowcast.platform.rounds.evaluation import model_sha256
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.outcome import Outcome
from narrowcast.platform.rounds.state import Run, RunState, start
from sampling import sampled

SHARING: dict[str, dict[str, Any]] = {
    "ditto": {"kind": "ditto"},
    "partial": {"kind": "partial", "phases": [{"trained": "head"}]},
    "pfedme": {"kind": "pfedme"},
    "per_fedavg": {"kind": "per_fedavg"},
    "apfl": {"kind": "apfl"},
    "adaptive apfl": {"kind": "apfl", "alpha_rate": 0.1},
    "fine_tune": {"kind": "fine_tune"},
}
METHODS = {**SHARING, "local": {"kind": "local"}}
QUANTISED = [{"kind": "quantise", "levels": 7}, "entropy"]
SHARED_BAND = {"channel": {"kind": "rayleigh", "access": "shared"}, "upload_seconds": 0.05}
BUFFERED = {"schedule": {"kind": "buffered", "concurrency": 5, "buffer_size": 3}}
TRAVELS: dict[str, dict[str, Any]] = {
    "quantised": {"codec": QUANTISED},
    "sparse with a memory": {"codec": ["error_feedback", {"kind": "top_k", "fraction": 0.1}]},
    "levels by the channel": {"codec": QUANTISED, "radio": {**SHARED_BAND, "allocation": "max_min"}},
    "secure sum": {"secure": "plain"},
    "median": {"aggregator": "median"},
    "adam": {"server_optimizer": "adam"},
}
"""How messages travel, and what the server does with them."""


def experiment(method: str, rounds: int = 1, **settings: Any) -> Experiment:
    of_algorithm = {
        name: settings.pop(name) for name in ("codec", "aggregator", "server_optimizer") if name in settings
    }
    values: dict[str, Any] = {
        "name": "composed",
        "data": {"kind": "digits", "clients": 12, "partition": {"kind": "dirichlet", "alpha": 0.3}},
        "model": {"kind": "mlp", "hidden": [16]},
        "algorithm": {**METHODS[method], **of_algorithm},
        "training": {"epochs": 2, "learning_rate": 0.05},
        "rounds": rounds,
        "clients_per_round": 5,
        "chunk_size": 3,
        "checkpoint_every": 1,
        "evaluate_every": rounds,
        "evaluate_clients": "test",
        "backend": "local",
        "tracking": {"system_metrics": False},
    }
    return build_experiment({**values, **settings}, "composed")


def run(of: Experiment, state: RunState | None = None) -> list[Outcome]:
    task = of.task(of.data_source.load())
    run = Run(of, of.secured_algorithm, task)
    return list(LocalBackend().run(run, start(run) if state is None else state))


def state_of(outcome: Outcome) -> RunState:
    assert outcome.state is not None
    return outcome.state


def kept(outcome: Outcome) -> dict[str, np.ndarray]:
    clients = state_of(outcome).clients
    return {name: clients[name] for name in clients if name.startswith(("personal/", "mixture/"))}


@pytest.mark.parametrize("travels", TRAVELS)
@pytest.mark.parametrize("method", sampled(SHARING, {"ditto", "partial", "per_fedavg", "apfl"}))
def test_what_clients_keep_does_not_depend_on_how_messages_travel(method: str, travels: str) -> None:
    (plain,), (other,) = run(experiment(method)), run(experiment(method, **TRAVELS[travels]))
    assert kept(plain).keys() == kept(other).keys()
    assert bool(kept(plain)) == (method not in ("per_fedavg", "fine_tune"))
    for name, values in kept(plain).items():
        assert values.any()
        assert np.array_equal(values, kept(other)[name])
    assert 0 < other.metrics["test.accuracy.mean"] <= 1
    sent, of_plain = other.record.total_uplink_bits, plain.record.total_uplink_bits
    if travels in ("median", "adam"):
        assert sent == of_plain
    elif travels == "secure sum":
        values = of_plain // 32  # of all clients, each of at least 16 bits and less than 32 in a sum
        assert 16 * values < sent < 32 * values
    else:
        assert 0 < sent < of_plain / 2


@pytest.mark.parametrize(
    ("method", "schedule"), [*((method, "rounds") for method in METHODS), *((method, "buffered") for method in SHARING)]
)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(method: str, schedule: str) -> None:
    of = experiment(method, rounds=4, **(BUFFERED if schedule == "buffered" else {}))
    whole = run(of)
    last, again = whole[-1], run(of, state_of(whole[1]))[-1]
    assert model_sha256(of.algorithm, state_of(again)) == model_sha256(of.algorithm, state_of(last))
    assert repr(again.record) == repr(last.record)
    assert again.metrics == last.metrics
    for name, values in state_of(last).clients.items():
        assert np.array_equal(values, state_of(again).clients[name])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "codec": ({"codec": QUANTISED}, "algorithm.codec is unknown"),
    "aggregator": ({"aggregator": "median"}, "algorithm.aggregator is unknown"),
    "masked": ({"secure": "masked"}, "local on mlp needs more than the weighted sum"),
    "buffered": (BUFFERED, "local as set here cannot count stale updates less"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_training_alone_has_no_messages_to_change(what: str) -> None:
    settings, message = REFUSED[what]
    assert message in refusal("local", settings)


@pytest.mark.parametrize("method", SHARING)
def test_what_no_average_can_do_is_refused_for_personal_ones_too(method: str) -> None:
    allocated = {"codec": QUANTISED, "radio": {**SHARED_BAND, "allocation": "min_error"}}
    assert "use max_min, which needs none" in refusal(method, allocated)
    assert "cannot be added up under encryption" in refusal(method, {"codec": QUANTISED, "secure": "masked"})
    assert "a buffered schedule weights updates by their age" in refusal(method, {**BUFFERED, "secure": "masked"})


def refusal(method: str, settings: dict[str, Any]) -> str:
    with pytest.raises(nc.UserError) as error:
        list(nc.rounds(experiment(method, **settings)))
    (line,) = str(error.value).splitlines()
    return line


# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
def test_a_study_chooses_among_them_by_what_clients_reach(tmp_path: Path) -> None:
    of = experiment("ditto", rounds=2).model_copy(update={"evaluate_clients": ("validation",)})
    choices = {"kind": "choice", "values": {name.replace(" ", "-"): method for name, method in METHODS.items()}}
    study = {
        "name": "methods",
        "experiment": of.model_dump(mode="json"),
        "study": {
            "objectives": {"validation.accuracy.mean": "maximize"},
            "sampler": "grid",
            "trials": len(METHODS),
            "backend": "local",
        },
        "space": {"algorithm": choices},
    }
    result = nc.tune(study, output=tmp_path)
    assert len(result.trials) == len(METHODS)
    assert result.trials["validation.accuracy.mean"].between(0, 1, inclusive="right").all()
