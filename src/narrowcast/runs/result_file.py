"""The content of a finished run's `result.json`, and its targets as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from narrowcast.platform.config import validate_result
from narrowcast.platform.json_files import read_json
from narrowcast.platform.tracking import units
from narrowcast.platform.tracking.targets import RunTargetCost
from narrowcast.runs.finished_run import RunFile
from narrowcast.runs.run_table import finish_advice


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


def read_result(path: Path) -> ResultFile:
    """Read `result.json`; raise `UserError` if it is damaged."""
    return validate_result(ResultFile, read_json(path, finish_advice(path.parent)), str(path))
