"""FedRep and FedAvg on the linear representation: the angle between the learnt subspace and the true one, by round.

Source and letters: `problem`. Runs are those of the platform: `partial` with the kept head, whose local epochs are full
gradient steps of the heads and then one of the body; FedAvg with one local step, with two, and with as many as FedRep;
and training alone. The platform's loss is 2 f_i, so that the paper's eta is twice the learning rate. Algorithm 1 with
heads of least squares, a loop in NumPy, begins at the same body.

Differs from the paper: 1. the heads are not solved exactly, but trained from where they were. 2. the mean of the bodies
is not made orthonormal; with exact heads the rows of a body that begins so stay nearly orthonormal. 3. the notebook
adds the clients' gradients up, from a body of larger norm, and has no noise here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import narrowcast as nc
from narrowcast.experiment import Experiment, build_experiment
from narrowcast.platform.tracking.figures import BLACK, BLUE, GREEN, ORANGE, VERMILLION, new_figure
from narrowcast.platform.types import FloatArray
from narrowcast.runs.significance import mean_interval
from narrowcast.studies.results import Line, Lines
from narrowcast.studies.tables import MeasuredTable, Measurements
from narrowcast.studies.verdicts import PaperVerdict, mean_and_spread
from narrowcast_papers.fedrep.problem import ExactHeads, LinearRepresentation, distances

ETA, HEAD_EPOCHS, ROUNDS, SEEDS = 0.1, 10, 600, 5
EVERY = 10
"""Rounds between two lines of the file."""
FEDREP, EXACT, ALONE = "FedRep", "Algorithm 1, exact heads", "alone"
_PHASES = [{"trained": "head", "epochs": HEAD_EPOCHS}, {"trained": "body"}]
_TUNED = {"kind": "fine_tune", "fine_tune_epochs": 200}
METHODS: Mapping[str, tuple[dict[str, Any], int]] = {
    FEDREP: ({"kind": "partial", "kept": "head", "phases": _PHASES}, HEAD_EPOCHS + 1),
    "FedAvg, 1 step": (_TUNED, 1),
    "FedAvg, 2 steps": (_TUNED, 2),
    f"FedAvg, {HEAD_EPOCHS + 1} steps": (_TUNED, HEAD_EPOCHS + 1),
    ALONE: ({"kind": "local"}, HEAD_EPOCHS + 1),
}
"""The algorithm and the local epochs of each method; what clients fine-tune is measured alone."""
BODY = "0.weight"
VALUES = ("round", "largest", "smallest", "factor", "rmse")
"""The columns of the file: `largest` and `smallest` are the sines of the two angles."""
_NEAR = 1e-2
"""The sine below which the distance falls by the factor of the linearised round."""


def experiment(method: str, source: LinearRepresentation, rounds: int) -> Experiment:
    """Return the experiment of a method, in which all clients take part in every round."""
    algorithm, epochs = METHODS[method]
    values: dict[str, Any] = {
        "name": "fedrep-linear",
        "seed": source.seed,
        "data": source.model_dump(),
        "model": {
            "kind": "torch",
            "factory": "narrowcast_papers.fedrep.problem:network",
            "arguments": {"features": source.features, "components": source.components},
            "dtype": "float64",
            "metrics": ["rmse"],
        },
        "algorithm": algorithm,
        "training": {"kind": "sgd", "learning_rate": ETA / 2, "batch_size": "all", "epochs": epochs},
        "rounds": rounds,
        "clients_per_round": source.clients,
        "chunk_size": source.clients,
        "evaluate_every": rounds,
        "evaluate_clients": "test",
        "checkpoint_every": EVERY,
        "checkpoint_seconds": 100000,
        "backend": "local",
    }
    return build_experiment(values, "fedrep-linear")


def first_body(source: LinearRepresentation) -> FloatArray:
    """Return the body before round 1, which is the same for all methods."""
    run = experiment(FEDREP, source, 1)
    return run.task(run.data_source.load()).initial_parameters()[BODY]


def bodies(method: str, source: LinearRepresentation, rounds: int) -> Iterator[tuple[int, FloatArray, float | None]]:
    """Yield the round and the body every `EVERY` rounds, and after the last one the clients' mean test error of a run.

    Algorithm 1 with heads of least squares is a loop, all others are runs.
    """
    if method == EXACT:
        problem, body = ExactHeads.of(source.load()), first_body(source)
        for index in range(1, rounds + 1):
            body = problem.step(body, ETA)
            if index % EVERY == 0:
                yield index, body, None
        return
    for outcome in nc.rounds(experiment(method, source, rounds)):
        if outcome.state is not None:
            yield outcome.record.round, outcome.state.server[BODY], outcome.metrics.get("test.rmse.mean")


def measure_method(method: str, seed: int) -> Iterator[Line]:
    """Yield the sines of both angles by round, with the last one the factor of the linearised round and the error.

    The error is the mean over clients of the root mean squared error on their test samples. Clients that train alone
    have no body in common.
    """
    source = LinearRepresentation(seed=seed)
    data, basis = source.load(), source.basis()
    problem, nothing = ExactHeads.of(data), dict.fromkeys(VALUES)
    if method == ALONE:
        *_, last = nc.rounds(experiment(method, source, ROUNDS))
        yield {**nothing, "round": ROUNDS, "rmse": last.metrics["test.rmse.mean"]}
        return
    for index, body, error in bodies(method, source, ROUNDS):
        line = {**nothing, "round": index, **dict(zip(VALUES[1:3], distances(body, basis).tolist(), strict=True))}
        if index == ROUNDS:
            line["factor"] = problem.factor(body, ETA) if method in (FEDREP, EXACT) else None
            line["rmse"] = problem.error(body, data) if method == EXACT else error
        yield line


def _of(lines: Lines, method: str, column: str) -> dict[str, dict[int, float]]:
    """Return the values of a column by seed and round."""
    values: dict[str, dict[int, float]] = {}
    for line in lines:
        if line["method"] == method and line[column]:
            values.setdefault(line["seed"], {})[int(line["round"])] = float(line[column])
    return values


def fitted_factor(sines: Mapping[int, float]) -> float:
    """Return the factor of a round, by least squares of the logarithm of the sines below `_NEAR`."""
    rounds, logarithms = zip(*((index, np.log(sine)) for index, sine in sines.items() if sine < _NEAR), strict=True)
    return float(np.exp(np.polyfit(rounds, logarithms, 1)[0]))


def judge_angles(lines: Lines) -> list[PaperVerdict]:
    """Return the last angle and the error of every method, and the factors of FedRep's."""
    verdicts = []
    for method in (EXACT, *METHODS):
        errors = [value for by_round in _of(lines, method, "rmse").values() for value in by_round.values()]
        if len(errors) < 2:
            continue
        error = f"test error {mean_and_spread(errors, 3)}"
        if method == ALONE:
            verdicts.append(PaperVerdict(method, "", "no common body", error, by_seed=tuple(errors)))
            continue
        sines = _of(lines, method, "largest")
        least = [min(by_round.values()) for by_round in sines.values()]
        last = [by_round[max(by_round)] for by_round in sines.values()]
        said, shown = "to 0" if method in (FEDREP, EXACT) else "not to 0", max(last)
        reached = f"{np.mean(last):.3f} (least {min(least):.3f})" if min(least) > _NEAR else f"at most {shown:.1e}"
        verdicts.append(PaperVerdict(f"{method}: sine of the largest angle", said, reached, error, by_seed=tuple(last)))
        if max(last) >= _NEAR:
            continue
        fitted = [fitted_factor(by_round) for by_round in sines.values()]
        exact = [value for by_round in _of(lines, method, "factor").values() for value in by_round.values()]
        mean, apart = mean_interval(fitted), float(np.abs(np.subtract(fitted, exact)).max())
        verdicts.append(
            PaperVerdict(
                f"{method}: factor of a round",
                f"linearised: {np.mean(exact):.4f}",
                f"{mean.mean:.4f} ({mean.low:.4f} to {mean.high:.4f})",
                f"a linear rate; within {apart:.1g} of the linearised round with every seed",
                by_seed=tuple(fitted),
            )
        )
    return verdicts


def plot_angles(lines: Lines, path: Path) -> None:
    """Plot the sine of the largest angle by round, a line for each seed."""
    figure, (axes,) = new_figure("The largest principal angle to the true subspace", panels=1)
    shared = [method for method in METHODS if method != ALONE]
    for method, colour in zip((*shared, EXACT), (VERMILLION, BLUE, GREEN, ORANGE, BLACK), strict=True):
        for place, by_round in enumerate(_of(lines, method, "largest").values()):
            style: dict[str, Any] = {"linestyle": ":", "zorder": 3} if method == EXACT else {}
            label = "" if place else method
            axes.plot(list(by_round), list(by_round.values()), color=colour, linewidth=1.2, label=label, **style)
    axes.set(xlabel="round", ylabel="sine of the largest angle", yscale="log")
    axes.legend(fontsize=8, frameon=False, loc="lower left")
    figure.savefig(path, dpi=120)


ANGLES = MeasuredTable(
    (
        Measurements(
            "fedrep-linear.csv",
            ("method", "seed"),
            VALUES,
            lambda _: product((EXACT, *METHODS), range(SEEDS)),
            measure_method,
        ),
    ),
    judge_angles,
    plot_angles,
)
