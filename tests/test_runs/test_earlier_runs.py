"""Runs of versions with one seed: how their files are read, and that their streams are still drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowcast.experiment import build_experiment, load_experiment
from narrowcast.platform.config import write_yaml
from narrowcast.runs.earlier_runs import has_one_seed, of_one_seed, saved_experiment, with_earlier_defaults
from narrowcast.runs.run_folder import CONFIG

CODED = 'algorithm.codec=[{kind: quantise, norms: column}, "entropy"]'


def folder_of(path: Path, *overrides: str, earlier: bool) -> Path:
    """A run's folder with nothing but its `config.yaml`."""
    values = load_experiment("scolr-ml100k", overrides).plain()
    if earlier:
        del values["client_seed"], values["training"]["shared_negatives"]
    write_yaml(values, path / CONFIG)
    return path


@pytest.mark.parametrize("coded", [True, False])
def test_an_earlier_run_keeps_its_streams(tmp_path: Path, coded: bool) -> None:
    folder = folder_of(tmp_path, "seed=7", "data.seed=0", *([CODED] if coded else []), earlier=True)
    saved = saved_experiment(folder, ["rounds=9"])
    assert has_one_seed(folder)
    assert (saved.seed, saved.client_seed, saved.rounds) == (7, 7, 9)
    assert saved.training.shared_negatives == coded  # only a coded upload has a list of rows
    assert saved.data_source.seed == 0  # type: ignore[attr-defined]
    saved.task(saved.data_source.load())


def test_what_an_earlier_experiment_left_out_has_the_value_of_that_time() -> None:
    own = {"name": "own", "data": "digits", "model": "mlp", "algorithm": "fedavg", "seed": 3}
    left_out = with_earlier_defaults(build_experiment(own, "own"))
    assert left_out.clock.compute_overhead_seconds == 10
    assert left_out.data_source.seed == 0  # type: ignore[attr-defined]
    said = {**own, "data": {"kind": "digits", "seed": 5}, "clock": {"compute_overhead_seconds": 0}}
    assert with_earlier_defaults(build_experiment(said, "own")) == build_experiment(said, "own")


def test_a_run_of_this_version_is_read_as_it_is(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "seed=7", CODED, earlier=False)
    assert not has_one_seed(folder)
    assert saved_experiment(folder) == load_experiment("scolr-ml100k", ["seed=7", CODED])


def test_what_has_no_negatives_shares_none() -> None:
    for name, *overrides in (["fedavg-digits"], ["scolr-ml100k", CODED, "training.negatives=0"], ["scolr-masked-ml1m"]):
        experiment = load_experiment(name, overrides)
        assert of_one_seed(experiment).training == experiment.training
        assert of_one_seed(experiment).client_seed == experiment.seed
