"""A finished run of an experiment, or a solve, read from its folder: metrics, costs, tables, figures, and what it made.

Reading executes no code: the tables are Parquet, the model or answer is safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from narrowcast.platform.config.files import MODEL
from narrowcast.platform.data.soundness import load_checked
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.journal import CLIENT_METRICS, ROUNDS
from narrowcast.platform.tracking import metrics, units
from narrowcast.platform.tracking.metrics import (
    CLIENTS,
    GLOBAL,
    NEW,
    SUCCESS,
    RunTargetCost,
    SolveTargetCost,
    format_metric,
    metric_label,
    metrics_of,
    metrics_over_clients,
    over_clients_text,
)
from narrowcast.platform.types import ITERATION, Arrays
from narrowcast.runs.finished_run import FinishedRun, ModelFormat, RunFile, write_arrays
from narrowcast.runs.folder import ANSWER, ITERATIONS, RESULT, read_arrays, read_table, saved_config

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from narrowcast.experiment import Experiment
    from narrowcast.solve_run import Solve


class Best(BaseModel):
    """The best value of a metric and the first round that had it."""

    model_config = ConfigDict(frozen=True)

    value: float
    round: int


class Input(BaseModel):
    """Inputs of a model: type, shape of a sample, and the range of the training samples."""

    model_config = ConfigDict(frozen=True)

    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float

    def __str__(self) -> str:
        """Return what a user of the exported model has to know, as text."""
        shape = f"{self.dtype} [{', '.join(map(str, self.shape))}]"
        if self.dtype == "uint8":  # as_input, which calls every module
            return f"{shape} from 0 to 255, divided by 255 before the model: give it values from 0 to 1"
        return f"{shape}, from {self.low:.4g} to {self.high:.4g} in the training samples"


class ResultFile(RunFile):
    """The content of `result.json`.

    `full_uplink_bits` is the uplink if each upload were the whole model in float32. `touched_uplink_bits` is that of
    the changed rows in float32, and for models without rows the former.
    `data_sha256` is None in runs of versions before 0.3. `personal` is true if clients have models of their own, and
    `inputs` are what the model was trained on, by name, in runs on samples.
    """

    algorithm: str
    data: str
    backend: str
    rounds: int
    best: Mapping[str, Best]
    targets: tuple[RunTargetCost, ...] = ()
    uplink_bits: int
    downlink_bits: int
    total_bits: int
    full_uplink_bits: int
    touched_uplink_bits: int
    simulated_seconds: float
    personal: bool = False
    inputs: Mapping[str, Input] = {}
    data_sha256: str | None = None
    model_sha256: str
    frozen_sha256: str | None = None


def target_cost(target: RunTargetCost) -> str:
    """Return the cost of a target as text."""
    seconds, uplink, total = target.simulated_seconds_to, target.uplink_bits_to, target.total_bits_to
    if seconds is None or uplink is None or total is None:
        return "not reached"
    traffic = f"{units.format_bits(uplink)} uplink, {units.format_bits(total)} in all"
    return f"after {units.format_seconds(seconds)}, {traffic}, {target.rounds_to} rounds"


def solve_target_cost(target: SolveTargetCost) -> str:
    """Return the cost of a target of a solve as text."""
    if target.iterations_to is None or target.solver_seconds_to is None:
        return "not reached"
    return f"after {target.iterations_to} iterations, {units.format_short_seconds(target.solver_seconds_to)}"


class Result(FinishedRun[ResultFile]):
    """A finished run of an experiment; the entries of its `file` other than `rounds` are attributes of it too."""

    main_figure = "accuracy_uplink"
    run_kind, step_name, table = "run", "round", ROUNDS
    columns = tuple(cost.column for cost in (metrics.UPLINK, metrics.TOTAL, metrics.TIME))

    @classmethod
    def read_file(cls, folder: Path) -> ResultFile:
        """Read `result.json` alone; raise `UserError` if it is damaged."""
        return ResultFile.read(folder)

    @property
    def steps(self) -> int:
        """The number of rounds."""
        return self.file.rounds

    @property
    def heading(self) -> str:
        """The run in a few words."""
        return f"{self.file.algorithm} on {self.file.data}, {self.file.rounds} rounds"

    @property
    def best(self) -> Mapping[str, Best]:
        """The best value of each metric and its round; the lowest of a loss.

        Rounds are chosen on validation, see `chosen`; the best of a test metric is too good an estimate.
        """
        return self.file.best

    @property
    def chosen(self) -> tuple[int, Mapping[str, float]] | None:
        """The round that was best on validation, by its first metric, and its metrics; None without validation."""
        primary = next(iter(metrics_of(self.final, "validation")), None)
        best = self.best.get(f"validation.{primary}")
        if best is None:
            return None
        rows = {name: metrics.column(self.history, name) for name in self.history.column_names if "." in name}
        of_round = metrics.column(self.history, "round") == best.round
        return best.round, {name: float(values[of_round][0]) for name, values in rows.items() if of_round.any()}

    @property
    def targets(self) -> tuple[RunTargetCost, ...]:
        """The cost of each of the experiment's `targets`."""
        return self.file.targets

    @property
    def uplink_bits(self) -> int:
        """Bits sent by all clients over the run, lost uploads included."""
        return self.file.uplink_bits

    @property
    def downlink_bits(self) -> int:
        """Bits received by all clients over the run."""
        return self.file.downlink_bits

    @property
    def total_bits(self) -> int:
        """Bits sent and received by all clients over the run."""
        return self.file.total_bits

    @property
    def full_uplink_bits(self) -> int:
        """Bits of the same uploads if each were the whole model in float32."""
        return self.file.full_uplink_bits

    @property
    def touched_uplink_bits(self) -> int:
        """Bits of the same uploads if each were the changed rows in float32."""
        return self.file.touched_uplink_bits

    @property
    def simulated_seconds(self) -> float:
        """Duration of the run on the virtual clock."""
        return self.file.simulated_seconds

    @property
    def model_sha256(self) -> str:
        """The sha256 of the global model and of the state that clients keep."""
        return self.file.model_sha256

    @property
    def frozen_sha256(self) -> str | None:
        """The sha256 of what no client trains in the model, frozen parameters and buffers; None if there is nothing."""
        return self.file.frozen_sha256

    @cached_property
    def rounds(self) -> DataFrame:
        """One row per round, with bits, seconds, loss, and the metrics of evaluated rounds (NaN elsewhere)."""
        return self.history.to_pandas()

    @cached_property
    def clients(self) -> DataFrame:
        """One row per participation of a client in a round, with bits, rank, seconds, delivered, loss."""
        return self._client_table.to_pandas()

    @property
    def evaluates_clients(self) -> bool:
        """True if the run evaluated clients one by one, see `evaluate_clients`."""
        return (self.folder / CLIENT_METRICS).is_file()

    @cached_property
    def client_metrics(self) -> DataFrame:
        """One row per client and evaluated round: the client's metrics on its own samples, NaN if it has none.

        Raise `UserError` if the run did not evaluate its clients.
        """
        return self.client_metrics_table.to_pandas()

    @cached_property
    def client_metrics_table(self) -> pa.Table:
        """`client_metrics` as an Arrow table."""
        if not self.evaluates_clients:
            raise UserError(f"{self.name} did not evaluate its clients; run it with evaluate_clients=test")
        return read_table(self.folder / CLIENT_METRICS, ("round", "client"))

    @cached_property
    def config(self) -> Experiment:
        """The experiment, as `config.yaml` has it."""
        from narrowcast.experiment import load_experiment

        return load_experiment(saved_config(self.folder))

    def arrays(self, client: int | None = None) -> Arrays:
        """Return the parameters of the trained global model by name, or of the model that a client uses."""
        if client is None:
            return read_arrays(self.folder, MODEL, "run the experiment again")
        from narrowcast.platform.models.modules import state_of

        return state_of(self.model(client))

    def model(self, client: int | None = None) -> Any:
        """Return the trained global model, or with the number of a client the one that it uses, as it was measured.

        A torch module in evaluation mode for networks, whose input shape is taken from the data set; the arrays by
        name for matrix factorisation, whose user factors never leave the clients. That of a client is made from the
        last checkpoint, by training on the client's samples where the method says so. Raise `UserError` if clients use
        the global model, if there is no such client, and if the checkpoint was removed.
        """
        if client is not None:
            from narrowcast.runs.client_model import client_module

            return client_module(self.folder, self.config, self.file.rounds, client)
        model, algorithm = self.config.model, self.config.algorithm
        if not algorithm.traits.global_model:
            raise UserError(
                f"{self.name}: clients of {algorithm.kind} have models of their own, and there is no global one"
            )
        if not model.has_module:
            return self.arrays()
        import torch

        module: Any = model.of_seed(self.seed).typed_module(load_checked(self.config.data_source))
        module.load_state_dict({name: torch.from_numpy(np.array(values)) for name, values in self.arrays().items()})
        return module.eval()

    def merged(self, client: int | None = None) -> Arrays:
        """Return the tensors of the base of `model: adapters` with the trained adapters added to its weights.

        Raise `UserError` for other models.
        """
        return self._adapters.merged(self.arrays(client), load_checked(self.config.data_source))

    def export_peft(self, folder: str | Path, client: int | None = None) -> Path:
        """Write the trained adapters of `model: adapters` as a folder of peft, and return it.

        `PeftModel.from_pretrained(base, folder)`, with the base that the run began with, has the outputs of the model.
        Raise `UserError` for other models.
        """
        data = load_checked(self.config.data_source)
        return self._adapters.write_peft(self.arrays(client), data, Path(folder))

    @property
    def _adapters(self) -> Any:
        """The model, as of the run's seed; raise `UserError` unless it has adapters."""
        from narrowcast.platform.models.adapters import Adapters

        model = self.config.model
        if not isinstance(model, Adapters):
            raise UserError(f"{self.name}: model.kind = {model.kind} has no adapters; export it as it is")
        return model.of_seed(self.seed)

    def export(
        self,
        path: str | Path,
        model_format: ModelFormat = "safetensors",
        *,
        client: int | None = None,
        merged: bool = False,
    ) -> Path:
        """Write the trained global model, or the one that a client uses, to a file and return its path.

        Adapters are added to the weights of their base if it is to be `merged`.

        `safetensors` keeps the arrays by name, with `inputs` as metadata; `torch` is a state_dict for
        `torch.load(path, weights_only=True)`.
        """
        arrays = self.merged(client) if merged else self.arrays(client)
        return write_arrays(arrays, path, model_format, self.inputs)

    @property
    def inputs(self) -> dict[str, str]:
        """The inputs of the model by name: type, shape and range; empty for runs of earlier versions and on ratings."""
        return {name: str(features) for name, features in self.file.inputs.items()}

    def figures(self) -> dict[str, Figure]:
        """Return the figures of the run by name.

        These are accuracy_round, accuracy_uplink, accuracy_total and accuracy_time, with every test metric whatever its
        name, client_bits_ranks, loss_time and client_metrics, without those for which nothing was measured.
        """
        from narrowcast.platform.tracking.figures import run_figures  # imports Matplotlib

        title = f"{self.name}: {self.file.algorithm} on {self.file.data}"
        of_clients = self.client_metrics_table if self.evaluates_clients else None
        return run_figures(self.history, self._client_table, title, of_clients, self.file.shares)

    def summary(self) -> list[tuple[str, str]]:
        """Return the summary as pairs of a label and a formatted value."""
        rows: list[tuple[str, str]] = []
        chosen, shares = self.chosen, self.file.shares
        for split in ("test", "validation"):
            # Without a global model there are statistics over clients alone.
            measured = metrics_of([key.removesuffix(f".{CLIENTS}") for key in self.final], split)
            for metric in [name for name in measured if name != "loss"] or measured:
                name, peak = f"{split}.{metric}", ""
                if chosen is not None and name in chosen[1]:
                    best = format_metric(name, chosen[1][name], shares)
                    peak = f" ({best} in round {chosen[0]}, the best on validation)"
                of_metric = []
                if name in self.final:
                    of_metric.append((metric_label(name), format_metric(name, self.final[name], shares) + peak))
                if statistics := over_clients_text(name, self.final, shares):
                    whose = "clients' own models" if self.file.personal else "clients"
                    of_metric.append((f"{metric_label(name)} of {whose}", statistics))
                rows += reversed(of_metric) if self.file.personal else of_metric
        for name in metrics_over_clients(self.final):
            if name.startswith((NEW, GLOBAL)):
                metric = metric_label(name.removeprefix(NEW).removeprefix(GLOBAL))
                whose = "new clients" if name.startswith(NEW) else "clients with the global model"
                rows.append((f"{metric} of {whose}", over_clients_text(name, self.final, shares)))
        if SUCCESS in self.final:
            rows.append((metric_label(SUCCESS), format_metric(SUCCESS, self.final[SUCCESS], shares)))
        rows += self.baseline_rows()
        rows += [(self.file.goal(target), target_cost(target)) for target in self.targets]
        compression = units.format_compression(self.uplink_bits, self.full_uplink_bits)
        if self.touched_uplink_bits != self.full_uplink_bits:
            lossless = units.format_compression(self.uplink_bits, self.touched_uplink_bits)
            compression += f", of changed rows in float32 {lossless}"
        return [
            *rows,
            ("uplink", f"{units.format_bits(self.uplink_bits)} ({self.uplink_bits:,} bits)"),
            ("compression", f"{compression} (full model: {units.format_bits(self.full_uplink_bits)})"),
            ("downlink", units.format_bits(self.downlink_bits)),
            ("total traffic", units.format_bits(self.total_bits)),
            ("simulated time", units.format_seconds(self.simulated_seconds)),
            ("wall time", units.format_seconds(self.wall_seconds)),
            ("seed", str(self.seed)),
            ("model sha256", self.model_sha256[:12]),
        ]

    def inputs_and_outputs(self) -> list[tuple[str, str]]:
        """Return model and backend, as pairs of a label and a value."""
        return [("model sha256", self.model_sha256), ("backend", self.file.backend)]

    @cached_property
    def _client_table(self) -> pa.Table:
        return read_table(self.folder / "clients.parquet", ("round", "client"))


class BestOfSolve(BaseModel):
    """The best value of a metric and the first iteration that had it."""

    model_config = ConfigDict(frozen=True)

    value: float
    iteration: int


class SolveFile(RunFile):
    """The content of a solve's `result.json`.

    `stopped_by` is `tolerance`, `iterations`, `solver_seconds`, or what the solver said of itself.
    """

    solver: str
    problem: str
    sizes: Mapping[str, int]
    problem_sha256: str
    stopped_by: str
    iterations: int
    residual: float
    best: Mapping[str, BestOfSolve]
    targets: tuple[SolveTargetCost, ...] = ()
    solver_seconds: float
    answer_sha256: str


class SolveResult(FinishedRun[SolveFile]):
    """A finished solve."""

    main_figure = "error_time"
    run_kind, step_name, table, columns = "solve", ITERATION, ITERATIONS, ("residual", "solver_seconds")

    @classmethod
    def read_file(cls, folder: Path) -> SolveFile:
        """Read `result.json` alone; raise `UserError` if it is damaged."""
        return SolveFile.read(folder)

    @property
    def steps(self) -> int:
        """The number of iterations."""
        return self.file.iterations

    @property
    def heading(self) -> str:
        """The solve in a few words."""
        return f"{self.file.solver} on {self.file.problem}, {self.file.iterations} iterations"

    @property
    def solver_seconds(self) -> float:
        """The time of the solver: its first state and its iterations, without measurements and records."""
        return self.file.solver_seconds

    @cached_property
    def iterations(self) -> DataFrame:
        """One row per recorded iteration: residual, time of the solver, and the metrics measured (NaN elsewhere)."""
        return self.history.to_pandas()

    @cached_property
    def config(self) -> Solve:
        """The solve, as `config.yaml` has it."""
        from narrowcast.solve_run import load_solve

        return load_solve(saved_config(self.folder))

    def answer(self) -> Arrays:
        """Return the answer's arrays by name."""
        return read_arrays(self.folder, ANSWER, "solve the problem again")

    def export(self, path: str | Path, model_format: ModelFormat = "safetensors") -> Path:
        """Write the answer to a file, as safetensors or as tensors by name for `torch.load`, and return its path."""
        return write_arrays(self.answer(), path, model_format)

    def figures(self) -> dict[str, Figure]:
        """Return the figures by name: error_iteration and error_time."""
        from narrowcast.platform.tracking.figures import solve_figures  # imports Matplotlib

        return solve_figures(self.history, f"{self.name}: {self.file.solver} on {self.file.problem}")

    @property
    def targets(self) -> tuple[SolveTargetCost, ...]:
        """The cost of each of the solve's `targets`."""
        return self.file.targets

    def summary(self) -> list[tuple[str, str]]:
        """Return the summary as pairs of a label and a formatted value."""
        file, shares = self.file, self.file.shares
        rows = [(metric_label(name), format_metric(name, value, shares)) for name, value in file.final.items()]
        rows += self.baseline_rows()
        rows += [(file.goal(target), solve_target_cost(target)) for target in file.targets]
        return [
            *rows,
            ("residual", f"{file.residual:.4g}"),
            ("iterations", f"{file.iterations} (ended by {file.stopped_by})"),
            ("time of the solver", units.format_short_seconds(file.solver_seconds)),
            ("wall time", units.format_short_seconds(file.wall_seconds)),
            ("problem", ", ".join(f"{value:,} {name}" for name, value in file.sizes.items())),
            ("seed", str(file.seed)),
            ("answer sha256", file.answer_sha256[:12]),
        ]

    def inputs_and_outputs(self) -> list[tuple[str, str]]:
        """Return answer and problem, as pairs of a label and a value."""
        return [("answer sha256", self.file.answer_sha256), ("problem sha256", self.file.problem_sha256)]


def kind_of(folder: Path) -> type[Result | SolveResult]:
    """Return what the folder of a finished run is read as."""
    return SolveResult if (folder / ITERATIONS).is_file() and (folder / RESULT).is_file() else Result


def load_any(folder: Path) -> Result | SolveResult:
    """Return the result in a run's folder; raise `UserError` if there is none."""
    return kind_of(folder).load(folder)
