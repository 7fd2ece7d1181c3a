"""The model that a run starts from: that of another run or a file, and what no client trains in it.

It stands apart from the contract of models because it needs the `Task`, whose contract needs that of models.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from narrowcast.platform.config.files import FROZEN, MODEL, START
from narrowcast.platform.contracts import Task
from narrowcast.platform.errors import UserError
from narrowcast.platform.models.model import Model
from narrowcast.platform.storage.disk import read_tensors
from narrowcast.platform.types import Arrays


def start_model(source: Path, folder: Path | None, model: Model, data: Any, seed: int) -> Arrays:
    """Return what is trained in the model of a finished run's folder or of a safetensors file, in its precision here.

    The copy in `folder`, that of the run which starts from it, goes first. Raise `UserError` if there is no model, if
    it is damaged, or if its arrays are not those of the model or, where they are not trained, have other values.
    """
    path = source / MODEL if source.is_dir() else source
    if folder is not None and (folder / START).is_file():
        path = folder / START
    try:
        start, _ = read_tensors(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"start_from = {source}: no model there ({error}); give the folder of a finished run, or a safetensors file"
        ) from None
    drawn: Arrays = model.init_server(data, seed)
    whole, fixed = model.of_seed(seed).state(drawn, data), model.of_seed(seed).fixed_names(data)
    has, wanted, also = ({name: list(array.shape) for name, array in part.items()} for part in (start, drawn, whole))
    if has not in (wanted, also):
        raise UserError(f"start_from = {source}: its model has {_listed(has)}, this experiment's {_listed(wanted)}")
    for name in start.keys() & fixed:
        if not np.array_equal(start[name], whole[name], equal_nan=True):
            raise UserError(
                f"start_from = {source}: its {name} is not that of this experiment, which does not train it; build the "
                "module with those values"
            )
    return {name: start[name].astype(values.dtype) for name, values in drawn.items()}


def pinned(task: Task, folder: Path | None) -> Task:
    """Return the task whose hosts refuse other frozen parameters and buffers than this process has built.

    Raise `UserError` if `folder`, that of the run, says that it began with others.
    """
    model = task.model
    sha256 = model.fixed_sha256(task.data)
    if folder is not None and (folder / FROZEN).is_file():
        sha256 = (folder / FROZEN).read_text().strip()
    model = model.pinned(sha256)
    model.fixed_names(task.data)
    return replace(task, model=model)


def _listed(shapes: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())
