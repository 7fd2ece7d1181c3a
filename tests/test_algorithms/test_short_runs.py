"""Short runs of every method give the model, the clients' states, the bits, ranks and time that were written down.

A change of the code that is to change no result changes none of these, in this process, in lockstep with another run,
after a resume, and on two actors of which one is killed.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from child_processes import kill_one
from narrowcast.cluster.backend import RayBackend
from processor import processor
from sampling import sampled
from short_runs import FIELDS, in_lockstep, loaded, outcomes, result_of, short_runs

EXPECTED = Path(__file__).parents[1] / "short_results.csv"
QUICK = (
    *("fedavg", "fedavg band", "fedavg median band", "fedavg buffered", "fednova", "qffl", "afl", "feddyn", "scaffold"),
    *("apfl", "local", "fine_tune", "ditto", "partial", "per_fedavg", "pfedme", "d_psgd", "choco_sgd"),
    *("dynamic_averaging", "semi_supervised", "semi_supervised server", "fedmatch", "fedmatch server"),
    *("server_free", "server_free ring", "dcd_psgd", "push_sum", "choco_sgd unequal"),
    *("submodel disjoint", "submodel graph", "fedma", "fedmd", "scolr network"),
    *("fedmf feedback", "colr", "scolr", "adaptive_svd rows", "fedmavg"),
)


def rows() -> dict[str, dict[str, str]]:
    with EXPECTED.open(newline="") as file:
        return {row["run"]: row for row in csv.DictReader(file)}


ROWS = rows()


def assert_as_written_down(name: str, result: Mapping[str, str]) -> None:
    row = ROWS[name]
    if row["processor"] == processor():
        assert {field: result[field] for field in FIELDS} == {field: row[field] for field in FIELDS}
    else:  # entropy-coded uploads, and with them the time, follow the last bit of every value
        for field in FIELDS[2:]:
            assert float(result[field]) == pytest.approx(float(row[field]), rel=1e-2), field


def test_every_run_is_written_down() -> None:
    assert ROWS.keys() == short_runs().keys()


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ROWS])
def test_in_this_process(name: str) -> None:
    *_, last = outcomes(experiment := loaded(name))
    assert_as_written_down(name, result_of(experiment, last))


ALONE = [name for name in ROWS if "secure" not in short_runs()[name]]


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(ALONE, QUICK))
def test_in_lockstep_with_another_seed(name: str) -> None:
    first, second = (loaded(name, seed=seed, **{"data.seed": 0}) for seed in (0, 1))
    assert_as_written_down(name, in_lockstep(first, second))


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(ROWS, QUICK))
def test_resumed_after_the_first_round(name: str) -> None:
    first, *_ = outcomes(experiment := loaded(name))
    *_, last = outcomes(experiment, state=first.state)
    assert_as_written_down(name, result_of(experiment, last))


@pytest.mark.slow
@pytest.mark.thorough  # test_killed_actors.py has each kind of state
@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize("name", QUICK)
def test_on_two_actors_of_which_one_is_killed(name: str) -> None:
    experiment = loaded(name)
    for outcome in outcomes(experiment, RayBackend(actors=2)):
        last = outcome
        if outcome.record.round == 1:
            time.sleep(0.02)  # the driver is now at work on the next round
            kill_one("ClientHost")
    assert_as_written_down(name, result_of(experiment, last))
