"""The model that one client uses, from Python and as a file, has the metrics that the run recorded for that client."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

import narrowcast as nc
from command_line import assert_refused, narrowcast
from narrowcast.experiment import load_experiment
from narrowcast.platform.errors import UserError
from narrowcast.runs.client_model import client_module
from narrowcast.runs.verification import verify
from sampling import sampled

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
CLIENTS = 11
SETTINGS: dict[str, Any] = {
    **{"data": {"kind": "digits", "clients": CLIENTS, "partition": {"kind": "dirichlet", "alpha": 0.5}}},
    **{"model": {"kind": "mlp", "hidden": [8]}, "rounds": 3, "evaluate_every": 2, "evaluate_clients": ["test"]},
    **{"training": {"epochs": 1, "batch_size": 10, "learning_rate": 0.1}, "tracking": {"system_metrics": False}},
    **{"clients_per_round": 6, "chunk_size": 4, "backend": "local"},
}
METHODS: dict[str, Mapping[str, Any]] = {
    "local": {},
    "fine_tune": {"fine_tune_epochs": 2, "fine_tune_rate": 0.05},
    "ditto": {"pull": 0.5},
    "apfl": {"alpha_rate": 0.1},
    "partial": {"kept": "head"},
    "per_fedavg": {"alpha": 0.05},
    "pfedme": {"pull": 2.0, "personal_rate": 0.05},
}
NORM: dict[str, Any] = {
    "kind": "torch", "factory": "norm_modules:batch_norm", "arguments": {"classes": 10}, "statistics": "local"
}  # fmt: skip


def run(output: Path, algorithm: Any, **more: Any) -> nc.Result:
    result: nc.Result = nc.run({**SETTINGS, "algorithm": algorithm, **more}, output=output, progress=False)
    return result


def measured(module: nn.Module, result: nc.Result, client: int) -> tuple[float, float]:
    """Return accuracy and loss on the test samples of a client, by torch alone."""
    data: Any = result.config.data_source.load()
    rows, _ = data.of_clients("test").rows(np.array([client]))
    features, labels = (torch.from_numpy(values[rows]) for values in (data.test.features, data.test.labels))
    with torch.no_grad():
        scores = module.eval()(features)
        return float((scores.argmax(1) == labels).double().mean()), float(cross_entropy(scores, labels))


def assert_as_recorded(module: nn.Module, result: nc.Result, client: int, prefix: str = "") -> None:
    last = result.client_metrics.query(f"round == {result.rounds['round'].max()} and client == {client}")
    ours, theirs = (
        measured(module, result, client),
        tuple(last[[f"{prefix}test.accuracy", f"{prefix}test.loss"]].to_numpy()[0]),
    )
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled(METHODS, {"ditto", "apfl", "partial"}))
def test_the_model_of_a_client_has_the_metrics_that_were_recorded(kind: str, tmp_path: Path) -> None:
    result = run(tmp_path, {"kind": kind, **METHODS[kind]}, name=kind)
    models = {client: result.model(client=client) for client in (0, 3, 4, CLIENTS - 1)}
    for client, module in models.items():
        assert_as_recorded(module, result, client)
    weights = [nn.utils.parameters_to_vector(module.parameters()) for module in models.values()]
    assert not any(torch.equal(weights[0], other) for other in weights[1:])
    said = narrowcast("export", kind, "--runs", tmp_path, "--client", 4, "--output", path := tmp_path / "four")
    assert (said.status, said.out.splitlines()[0]) == (0, f"model   {path}")
    blank = result.config.model.module(result.config.data_source.load())
    blank.load_state_dict(load_file(path))
    assert_as_recorded(blank, result, 4)


@pytest.mark.slow
def test_new_clients_are_in_all_that_a_run_leaves(tmp_path: Path) -> None:
    result = run(tmp_path, {"kind": "ditto", "pull": 0.5}, name="joined", new_clients=3)
    last = result.client_metrics.query("round == 3")
    new = last["client"][last["new.test.accuracy"].notna()].tolist()
    assert len(new) == 3
    assert not set(new) & set(result.clients["client"])
    assert last["test.accuracy"].isna().tolist() == [client in new for client in last["client"]]
    assert_as_recorded(result.model(client=new[1]), result, new[1], "new.")
    assert [check for check in verify(result.folder) if check.problem] == []
    sent = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").get_run(str(result.mlflow_run_id)).data.metrics
    names = ["new.test.accuracy.mean", "new.test.accuracy.worst_10_percent", "test.accuracy.better_than_global"]
    assert [sent[name] for name in names] == [result.final[name] for name in names]
    labels = dict(result.summary())
    assert labels["test accuracy of new clients"].startswith(f"mean {100 * result.final[names[0]]:.2f} %")
    share = f"better than the global model for {100 * result.final[names[2]]:.2f} %"
    assert labels["test accuracy of clients' own models"].endswith(share)
    assert "test accuracy of clients with the global model" in labels
    table = nc.compare(result).text_tables()["Metrics over clients"]
    assert [row[1] for row in table.rows] == ["test accuracy", "new test accuracy", "global test accuracy"]
    figure = nc.compare(result).clients_figure()
    assert figure is not None
    of_clients, of_new = (line.get_ydata() for line in figure.axes[0].lines)
    for line, name in ((of_clients, "test.accuracy"), (of_new, "new.test.accuracy")):
        assert line[[0, 50, 100]] == pytest.approx(np.percentile(100 * last[name].dropna(), [0, 50, 100]))
    assert "new clients" in result.figures()["client_metrics"].legends[0].get_texts()[0].get_text()


def test_own_layers_beside_the_global_model_are_a_clients_model(tmp_path: Path) -> None:
    result = run(tmp_path, "fedavg", model=NORM)
    assert_as_recorded(result.model(client=2), result, 2)
    result.export(path := tmp_path / "two.pt", "torch", client=2)
    blank = result.config.model.module(result.config.data_source.load())
    blank.load_state_dict(torch.load(path, weights_only=True))
    assert_as_recorded(blank, result, 2)


def test_clients_with_networks_of_their_own_have_these(tmp_path: Path) -> None:
    models = [{"kind": "mlp", "hidden": [8]}, {"kind": "mlp", "hidden": [5]}]
    data = {**SETTINGS["data"], "public": {"samples": 100}}
    short = {"public_epochs": 1, "private_epochs": 1}
    result = run(tmp_path, {"kind": "fedmd", "models": models, **short}, data=data, model=models[0])
    units = {result.model(client=client)[1].out_features for client in range(CLIENTS)}
    assert units == {8, 5}
    assert_as_recorded(result.model(client=7), result, 7)


@pytest.mark.slow
def test_what_has_no_model_of_a_client_is_refused_in_one_line(tmp_path: Path) -> None:
    run(tmp_path, "fedavg", name="shared")
    run(tmp_path, "ditto", name="own")

    def export(name: str, client: int = 0) -> Any:
        return narrowcast("export", name, "--runs", tmp_path, "--client", client, "--output", tmp_path / "model")

    assert_refused(export("shared"), "shared: clients of fedavg use the global model; leave out client")
    assert_refused(export("own", CLIENTS), f"own has no client {CLIENTS}; it has {CLIENTS}: give one of 0 to 10")
    shutil.rmtree(tmp_path / "own" / "checkpoint")
    assert_refused(export("own"), "own has no checkpoint in", "run the experiment again")
    solve = {"kind": "synthetic_completion", "rows": 20, "columns": 10, "rank": 1, "fraction": 0.8}
    nc.solve({"name": "solved", "problem": solve, "solver": "asd", "iterations": 1}, output=tmp_path, progress=False)
    assert_refused(export("solved"), "solved is a solve, without clients and adapters; give --format and --output only")
    assert not (tmp_path / "model").exists()
    with pytest.raises(UserError, match="users: clients of matrix_factorisation keep factors of their own"):
        client_module(tmp_path / "users", load_experiment("scolr-ml100k"), 1, 0)


@pytest.mark.slow
def test_an_earlier_checkpoint_is_not_taken_for_the_last(tmp_path: Path) -> None:
    run(tmp_path, "ditto", name="own", checkpoint_every=1)
    *_, last = sorted((tmp_path / "own" / "checkpoint").glob("round-*"))
    last.unlink()
    assert_refused(
        narrowcast("export", "own", "--runs", tmp_path, "--client", 0), "own has 3 rounds, and its last checkpoint is"
    )
