"""The Python API: names, laziness, threads, errors, and the trained model."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import narrowcast as nc
from command_line import assert_refused, narrowcast
from narrowcast.platform.config.catalog import REGISTRIES
from narrowcast.platform.models.networks import MLP

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
QUICK = {"rounds": 3, "evaluate_every": 1, "tracking.system_metrics": False}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def digits(output: Path) -> nc.Result:
    result = nc.run("fedavg-digits", QUICK, backend="local", output=output, progress=False)
    assert isinstance(result, nc.Result)
    return result


def accuracy(module: torch.nn.Module, result: nc.Result) -> float:
    samples = result.config.data.load().test  # type: ignore[attr-defined]
    with torch.no_grad():
        classes = module(torch.from_numpy(np.array(samples.features))).argmax(dim=1)
    return float((classes.numpy() == samples.labels).mean())


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, narrowcast as nc\n"
        "heavy = {'torch', 'ray', 'mlflow', 'numpy', 'pandas', 'pydantic'} & {*sys.modules}\n"
        "assert not heavy, heavy\nassert {'run', 'Experiment', 'models', 'UserError'} <= {*dir(nc)}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", nc.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(nc, name) is not None


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'simulate'"):
        _ = nc.simulate  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("namespace", "registry"),
    [
        (nc.algorithms, "algorithm"),
        (nc.data, "data"),
        (nc.models, "model"),
        (nc.training, "training"),
        (nc.codecs, "codec"),
        (nc.fleets, "fleet"),
        (nc.partitions, "partition"),
        (nc.learning_rate_schedules, "learning_rate_schedule"),
        (nc.problems, "problem"),
        (nc.server_optimizers, "server_optimizer"),
        (nc.solvers, "solver"),
        (nc.aggregators, "aggregator"),
        (nc.attacks, "attack"),
        (nc.topologies, "topology"),
        (nc.rank_policies, "rank_policy"),
        (nc.schedules, "schedule"),
        (nc.channels, "channel"),
        (nc.downlinks, "downlink"),
        (nc.allocations, "allocation"),
        (nc.availabilities, "availability"),
        (nc.samplings, "sampling"),
        (nc.secure, "secure"),
        (nc.backends, "backend"),
    ],
)
def test_a_line_of_the_catalog_is_a_class_of_the_namespace(namespace: Any, registry: str) -> None:
    for each in REGISTRIES[registry].values():
        assert getattr(namespace, each.__name__) is each
        assert each.__name__ in dir(namespace)


def test_an_unknown_class_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"narrowcast.models has no MPL; it has .*Did you mean \"MLP\""):
        _ = nc.models.MPL
    with pytest.raises(AttributeError, match=r"narrowcast.algorithms has no FedAvgg; .*Did you mean \"FedAvg\""):
        _ = nc.algorithms.FedAvgg


def test_an_experiment_from_python_is_the_one_of_its_file(tmp_path: Path) -> None:
    experiment = nc.Experiment(
        data=nc.data.MovieLens100K(),
        algorithm=nc.algorithms.SCoLR(rank=4),
        radio={"channel": nc.channels.LogNormalRates(), "upload_seconds": 2.0},
        name="own",
    )
    read = nc.Experiment(**{**experiment.plain()})
    assert experiment.training.batch_size == 64  # type: ignore[attr-defined]  # the default of its data set
    path = experiment.save(tmp_path / "own.yaml")
    from narrowcast.experiment import load_experiment

    assert load_experiment(str(path)) == read == experiment
    assert load_experiment(str(path)).digest() == experiment.digest()
    assert load_experiment(experiment, ["algorithm.rank=8"]).algorithm.rank == 8  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rounds": 0}, "Experiment: rounds = 0: should be greater than or equal to 1"),
        ({"algorithm": "fedavgg"}, 'algorithm.kind = "fedavgg" is unknown; .* Did you mean "fedavg"'),
        ({"algorithm": MLP()}, "algorithm"),
        ({"modell": MLP()}, 'modell is unknown; .* Did you mean "model"'),
    ],
)
def test_a_wrong_field_is_one_clear_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(nc.UserError, match=message) as caught:
        nc.Experiment(**{"data": nc.data.Digits(), "algorithm": nc.algorithms.FedAvg(), **values})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nc.partitions.Dirichlet(alpha=0), "Dirichlet: alpha = 0: should be greater than or equal to 0.001"),
        (lambda: nc.training.SGD(learning_rate=-1), "SGD: learning_rate = -1: should be greater than 0"),
        (lambda: nc.data.Digits(clientz=3), 'Digits: clientz is unknown; .* Did you mean "clients"'),
        (lambda: nc.data.Digits(partition={"kind": "dirichlet", "alpha": 0}), "Digits: partition.alpha = 0: should"),
        (nc.channels.Trace, "Trace: path is missing"),
        (
            lambda: setattr(nc.data.Digits(), "clients", 3),
            "Digits.clients cannot be assigned, since the obj",
        ),
    ],
)
def test_a_wrong_object_of_a_section_is_one_clear_error(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(nc.UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None  # a notebook shows one error, not two


def test_an_experiment_cannot_be_assigned_to() -> None:
    experiment = nc.Experiment(data=nc.data.Digits(), algorithm=nc.algorithms.FedAvg())
    with pytest.raises(nc.UserError, match=r"Experiment.rounds cannot be assigned, since the object is frozen; make"):
        experiment.rounds = 3  # type: ignore[misc]


def test_bad_input_writes_nothing(tmp_path: Path) -> None:
    for arguments in (("fedavg-digit",), ("fedavg-digits", {"algorithm.rnk": 1}), ()):
        with pytest.raises(nc.UserError):
            nc.run(*arguments, output=tmp_path / "runs")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'backendd'"):
        nc.run("fedavg-digits", backendd="local")  # type: ignore[call-arg]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_overrides_are_plain_values_objects_or_arrays(tmp_path: Path) -> None:
    overrides = {
        "rounds": np.int64(1),
        "algorithm": nc.algorithms.FedProx(mu=0.5),
        "targets": {"test.accuracy": [0.01]},
        "tracking.system_metrics": False,
    }
    result = nc.run("fedavg-digits", overrides, backend="local", output=tmp_path, progress=False)
    assert (result.file.algorithm, result.file.rounds, result.config.algorithm.mu) == ("fedprox", 1, 0.5)
    assert result.targets[0].rounds_to == 1


def test_the_tables_have_the_rounds_and_the_clients(digits: nc.Result) -> None:
    assert digits.rounds["round"].tolist() == [1, 2, 3]
    assert digits.clients.uplink_bits.sum() == digits.uplink_bits == digits.rounds.total_uplink_bits.iloc[-1]
    assert digits.final["test.accuracy"] == digits.rounds["test.accuracy"].iloc[-1]
    assert digits.best["test.loss"].value == digits.rounds["test.loss"].min()
    assert (digits.seed, digits.config.name) == (0, "fedavg-digits")
    assert f"{100 * digits.final['test.accuracy']:.2f} %" in repr(digits)
    assert digits.plot("loss_time").axes
    with pytest.raises(nc.UserError, match=r"has no figure accuracy; it has accuracy_round, "):
        digits.plot("accuracy")


def test_the_trained_module_has_the_accuracy_of_the_run(digits: nc.Result) -> None:
    module = digits.model()
    assert not module.training
    assert accuracy(module, digits) == pytest.approx(digits.final["test.accuracy"], abs=1e-12)


def test_a_matrix_factorisation_gives_its_arrays_even_without_checkpoints(output: Path) -> None:
    settings = {**QUICK, "checkpoint_path": str(output / "elsewhere")}
    result = nc.run("scolr-ml100k", settings, backend="local", output=output, progress=False)
    shutil.rmtree(output / "elsewhere")
    assert {name: values.shape for name, values in result.model().items()} == {"item_factors": (1682, 64)}


@pytest.mark.parametrize("model_format", ["safetensors", "torch"])
def test_an_exported_model_has_the_accuracy_of_the_run(digits: nc.Result, tmp_path: Path, model_format: str) -> None:
    path = tmp_path / "new" / f"model.{model_format}"
    said = narrowcast("export", digits.folder, "--format", model_format, "--output", path)
    inputs = "inputs  features: float32 [64], from 0 to 1 in the training samples\n"
    assert (said.status, said.err, said.out) == (0, "", f"model   {path}\n{inputs}")
    state = load_file(path) if model_format == "safetensors" else torch.load(path, weights_only=True)
    module = digits.config.model.module(digits.config.data.load())  # type: ignore[attr-defined]
    module.load_state_dict(state)
    assert accuracy(module, digits) == pytest.approx(digits.final["test.accuracy"], abs=1e-12)


def test_what_cannot_be_exported_is_said_in_one_line(digits: nc.Result, tmp_path: Path) -> None:
    assert_refused(narrowcast("export", "nope", "--runs", tmp_path), "nope: no such folder")
    assert_refused(narrowcast("export", digits.folder, "--output", "/proc/x/model"), "cannot write /proc/x/model")
    assert_refused(narrowcast("export", digits.folder, "--format", "onnx"), "'onnx' is not one of")


def test_a_comparison_shows_what_differs(output: Path, digits: nc.Result) -> None:
    other = nc.run(
        "fedavg-digits", {**QUICK, "training.learning_rate": 0.2, "name": "other"}, backend="local", output=output,
        progress=False,
    )  # fmt: skip
    table = nc.compare([digits, "other"], output=output).table
    assert table.index.tolist() == ["fedavg-digits", "other"]
    assert table["training.learning_rate"].tolist() == [digits.config.training.learning_rate, 0.2]  # type: ignore[attr-defined]
    assert "algorithm.codec" not in table
    assert table.uplink_bits.tolist() == [digits.uplink_bits, other.uplink_bits]
    csv = output / "table.csv"
    assert narrowcast("compare", "fedavg-digits", "other", "--output", output, "--csv", csv).status == 0
    assert csv.read_text().splitlines()[0].startswith("run,algorithm,data,training.learning_rate,rounds,")
    with pytest.raises(nc.UserError, match="no runs to compare"):
        nc.compare([])


def test_a_run_in_a_thread_and_one_in_a_coroutine_are_the_same(tmp_path: Path, digits: nc.Result) -> None:
    results: list[nc.Result] = []

    def run(name: str) -> None:
        results.append(
            nc.run("fedavg-digits", {**QUICK, "name": name}, backend="local", output=tmp_path, progress=False)
        )

    thread = threading.Thread(target=run, args=("thread",))
    thread.start()
    thread.join()

    async def main() -> None:
        run("inside-the-loop")
        await asyncio.to_thread(run, "beside-the-loop")

    asyncio.run(main())
    assert [each.model_sha256 for each in results] == [digits.model_sha256] * 3


def test_the_bare_loop_gives_the_rounds_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcomes = list(nc.rounds("fedavg-digits", QUICK, backend="local"))
    assert [each.record.round for each in outcomes] == [1, 2, 3]
    assert outcomes[-1].state is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_its_output(tmp_path: Path) -> None:
    words = ("run", "fedavg-digits", "rounds=200", "--backend", "local", "tracking.system_metrics=false")
    command = [sys.executable, "-m", "narrowcast", *words, "--output", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        begun = "fedavg-digits: fedavg on digits, model mlp, 200 rounds, backend local\n"
        assert run.stdout.readline() == begun
        run.stdout.close()  # as `| head -1` does
        assert run.stderr.read() == ""
        assert run.wait() == 0
    assert nc.load_run(tmp_path / "fedavg-digits").file.rounds == 200
