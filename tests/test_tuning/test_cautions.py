"""What a study says of the trial that it chose: values at the edge of their range, and too few seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from command_line import narrowcast
from narrowcast.tuning.result import cautions_on
from narrowcast.tuning.space import Dimension, Space, edges
from narrowcast.tuning.trials import TrialRecord
from studies import EXPERIMENT, result, write_study

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
RATE = {"kind": "float", "low": 0.001, "high": 1.0, "log": True}
DIMENSION: TypeAdapter[Any] = TypeAdapter(Dimension)


@pytest.mark.parametrize(
    ("fields", "inside", "at_an_edge"),
    [
        (RATE, [0.0015, 0.5, 0.03], {0.0013: 0.001, 0.001: 0.001, 0.9: 1.0}),  # a twentieth of log(1000) is log(1.41)
        ({"kind": "float", "low": 0, "high": 10}, [0.51, 9.49], {0.49: 0.0, 9.51: 10.0}),
        ({"kind": "float", "low": 0, "high": 0.3, "step": 0.1}, [0.1, 0.2], {0.0: 0.0, 0.3: 0.3}),
        ({"kind": "int", "low": 1, "high": 64, "log": True}, [2, 63], {1: 1, 64: 64}),
        ([5, 10, 20], [10], {5: 5, 20: 20}),
        ([5, 20], [5, 20], {}),
        (["momentum", "adam", "none"], ["momentum", "none"], {}),
        ([False, True, None], [False, True, None], {}),
    ],
)
def test_the_edges_of_a_dimension(fields: Any, inside: list[Any], at_an_edge: dict[Any, Any]) -> None:
    space = Space({"training.learning_rate": DIMENSION.validate_python(fields)})
    for value in inside:
        assert edges(space, {"training.learning_rate": value}) == {}
    for value, end in at_an_edge.items():
        assert edges(space, {"training.learning_rate": value}) == {"training.learning_rate": end}


def test_the_chosen_trial_is_cautioned_about() -> None:
    space = Space({"training.learning_rate": DIMENSION.validate_python(RATE)})
    inside, edge = (TrialRecord(0, "complete", {"training.learning_rate": value}) for value in (0.03, 1.0))
    assert cautions_on(space, inside, 3) == []
    assert cautions_on(space, edge, 3) == [
        "training.learning_rate = 1.0 is at the edge of its range, which ends at 1.0; a better value may lie "
        "beyond it: widen space.training.learning_rate"
    ]
    (line,) = cautions_on(space, inside, 2)
    assert line.startswith("each trial had 2 seeds; ")


@pytest.mark.slow
def test_a_study_prints_and_keeps_its_cautions(tmp_path: Path) -> None:
    rates = "space: {training.learning_rate: [0.0001, 0.001, 0.01]}\n"  # digits want a hundred times more
    grid = "study: {objectives: {validation.accuracy: maximize}, sampler: grid, backend: local, holdout: {trials: 0}}\n"
    said = narrowcast("tune", write_study(tmp_path, EXPERIMENT + grid + rates), "--output", tmp_path)
    assert (said.status, said.err) == (0, "")
    cautions = result(tmp_path / "digits")["cautions"]
    assert [line.partition(" ")[0] for line in cautions] == ["training.learning_rate", "each"]
    assert all(line in said.out for line in cautions)
