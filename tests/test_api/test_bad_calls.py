"""What the functions of the Python API take, and the line that they answer to anything else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import narrowcast as nc
from command_line import assert_refused, narrowcast

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
DIGITS: dict[str, Any] = {
    "name": "mapped",
    "data": {"kind": "digits", "clients": 20},
    "algorithm": "fedavg",
    "rounds": 2,
    "tracking": {"system_metrics": False},
}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda out: nc.run({}, output=out), "experiment: data is missing; algorithm is missing"),
        (lambda out: nc.run("", output=out), r"the name of the experiment is empty; give a packaged one .* or a YAML"),
        (
            lambda out: nc.run(3, output=out),
            r"^3 \(int\) is not an experiment; give the name of a packaged one, the",
        ),
        (lambda out: nc.run([DIGITS], output=out), r"\(list\) is not an experiment; give"),
        (
            lambda out: nc.run({**DIGITS, "rounds": 0}, output=out),
            "mapped: rounds = 0: should be greater than or",
        ),
        (lambda out: nc.run({**DIGITS, "data": print}, output=out), "print.* which no experiment file can have; give"),
        (lambda out: nc.run({"experiment": "fedavg-digits", "study": {}}, output=out), "is a study, not an experiment"),
        (
            lambda out: nc.run(DIGITS, ["rounds=3"], output=out),
            r"overrides are \['rounds=3'\] \(list\); give a map",
        ),
        (lambda out: nc.run(DIGITS, "rounds=3", output=out), r"overrides are 'rounds=3' \(str\); give a mapping"),
        (lambda out: nc.run(DIGITS, {"rounds": object()}, output=out), "object, which no experiment file can have"),
        (lambda out: nc.run(DIGITS, resume=3, output=out), r"resume is 3 \(int\); give True, the name of a run, or"),
        (lambda _: nc.run(DIGITS, output=3), r"output is 3 \(int\); give the path of a folder"),
        (lambda out: nc.solve(3, output=out), r"3 \(int\) is not an experiment; give"),
        (lambda _: list(nc.rounds(3)), r"3 \(int\) is not an experiment; give"),
        (lambda _: list(nc.rounds({})), "data is missing"),
        (lambda _: list(nc.iterations(3)), r"3 \(int\) is not an experiment; give"),
        (lambda out: nc.tune(3, output=out), r"3 \(int\) is not a study; give"),
        (lambda out: nc.tune({}, output=out), "study: experiment: name a packaged one or a file, or write one here"),
        (lambda out: nc.benchmark(3, output=out), r"3 \(int\) is not a benchmark; give"),
        (lambda out: nc.load_run(3, output=out), r"3 \(int\) is not a run; give its name in "),
        (lambda out: nc.compare("name", output=out), "name: no such folder; give the folder of a run"),
        (lambda out: nc.compare("name-*", output=out), r"no finished run matches name-\*; finished runs in .*: none"),
        (
            lambda out: nc.compare(3, output=out),
            r"3 \(int\) is not a run; give its name, its folder, a result, or a",
        ),
        (lambda out: nc.compare([3], output=out), r"3 \(int\) is not a run; give its name, its folder, or a result"),
        (lambda out: nc.compare([], output=out), "no runs to compare; give at least one finished run"),
        (lambda out: nc.site(3, output=out), r"3 \(int\) is not a run; give"),
        (lambda _: nc.submit("fedavg-digits", address=3), r"address is 3 \(int\); give the dashboard of the cluster"),
    ],
)
def test_what_a_function_does_not_take_is_one_clear_error(
    call: Callable[[Path], Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nc.UserError, match=message) as caught:
        call(tmp_path / "runs")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_mapping_is_run_as_the_file_with_its_values(tmp_path: Path) -> None:
    from ruamel.yaml import YAML

    YAML().dump(DIGITS, tmp_path / "mapped.yaml")
    codec = {"algorithm": {"codec": [nc.codecs.Quantise(levels=3)]}, "algorithm.server_learning_rate": 0.5}
    of_file, of_mapping = (
        nc.run(source, codec, output=tmp_path / "runs", progress=False)
        for source in (tmp_path / "mapped.yaml", {**DIGITS, "data": nc.data.Digits(clients=20)})
    )
    assert (of_mapping.name, of_file.name) == ("mapped-2", "mapped")
    assert of_mapping.model_sha256 == of_file.model_sha256
    assert of_mapping.config.algorithm.codec[0].levels == 3
    assert DIGITS["data"] == {"kind": "digits", "clients": 20}  # the user's mapping is as it was


def test_the_namespace_of_algorithms_lists_its_classes_as_the_others_do() -> None:
    import narrowcast.algorithms.codecs.chain  # the package bears the namespace and its submodules

    assert repr(nc.algorithms).startswith("narrowcast.algorithms: FedAvg, FedProx, ")
    assert repr(nc.models).startswith("narrowcast.models: MatrixFactorisation, ")
    assert sys.modules["narrowcast.algorithms"] is nc.algorithms is narrowcast.algorithms


@pytest.mark.slow
def test_a_notebook_without_widgets_is_not_warned_of_them() -> None:
    code = "import warnings, narrowcast as nc\nnc.run\nwarnings.warn('IProgress not found. Please update jupyter')"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_patterns_of_packaged_experiments_are_listed() -> None:
    said = narrowcast("show", "fedavg-*")
    assert [line.split()[0] for line in said.out.splitlines()] == ["experiment", "fedavg-digits"]
    assert_refused(narrowcast("show", "fedprox*"), "no packaged experiment matches fedprox*; packaged: colr-ckks-ml1m")


@pytest.mark.slow
def test_a_notebook_shows_an_error_in_one_line_and_how_to_resume() -> None:
    code = "import narrowcast as nc\nnc.run({'data': 'digits'})"
    shell = [sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "-c", code]
    ended = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert ended.stdout.strip().splitlines() == ["UserError: experiment: algorithm is missing"]
    failed = nc.RunFailed("lost")
    failed.add_note("resume with nc.run(resume='a')")
    assert failed._render_traceback_() == ["RunFailed: lost", "resume with nc.run(resume='a')"]
