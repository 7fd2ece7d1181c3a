"""The model that a run starts from in place of parameters drawn from its seed: that of a run, or a file."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from narrowcast.platform.atomic_files import read_tensors
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays
from narrowcast.runs.run_folder import MODEL, START


def start_model(place: Path, folder: Path | None, drawn: Arrays) -> Arrays:
    """Return the model of a finished run's folder or of a safetensors file, in the precision of `drawn`.

    The copy in `folder`, that of the run which starts from it, goes first. Raise `UserError` if there is no model, if
    it is damaged, or if its arrays are not those of `drawn`.
    """
    path = place / MODEL if place.is_dir() else place
    if folder is not None and (folder / START).is_file():
        path = folder / START
    try:
        model, _ = read_tensors(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"start_from = {place}: no model there ({error}); give the folder of a finished run, or a safetensors file"
        ) from None
    has, wanted = ({name: list(values.shape) for name, values in each.items()} for each in (model, drawn))
    if has != wanted:
        raise UserError(f"start_from = {place}: its model has {_listed(has)}, this experiment's {_listed(wanted)}")
    return {name: model[name].astype(values.dtype) for name, values in drawn.items()}


def _listed(shapes: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())
