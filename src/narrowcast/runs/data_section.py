"""The data set that a word of the command line names: an experiment's, a kind, or a file or folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from narrowcast.experiment import load_replicas, packaged_experiments
from narrowcast.platform.config.catalog import DATA, PARTITIONS
from narrowcast.platform.config.files import Defaults, Section, apply_overrides, plugin_folders, validate
from narrowcast.platform.data.dataset import Dataset, DataSource
from narrowcast.platform.data.download import located
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.data.samples import described as shapes
from narrowcast.platform.errors import UserError
from narrowcast.platform.tracking.partition_counts import classes_held
from narrowcast.platform.types import IntArray

_BY_SUFFIX = {
    "ratings": (
        *(f"{end}{packed}" for end in (".csv", ".tsv") for packed in ("", ".gz", ".bz2", ".zst")),
        *(".parquet", ".pq", ".xlsx", ".xls"),  # the last two are refused, with advice
    ),
    "npz": (".npz",),
}
_HUGGING_FACE = ("dataset_dict.json", "state.json")


class _DataSection(Section):
    """The section `data` of an experiment, by itself."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    data: Annotated[DataSource, DATA]


def data_source(named: str, overrides: Iterable[str]) -> DataSource:
    """Return the data set of an experiment (YAML file or packaged), of a kind, or of a user's file or folder.

    Overrides are those of an experiment, such as data.partition=shards. Raise `UserError` if there is no such data set.
    """
    section = _section(named)
    if section is None:
        if not Path(named).exists() and named not in packaged_experiments():
            raise UserError(
                f'"{named}" is not an experiment, a file, a folder or a kind of data; kinds: {", ".join(DATA.known())}'
            )
        return load_replicas(named, overrides)[0].data_source
    values = apply_overrides({"data": section}, overrides, Defaults(_DataSection, plugin_folders(named)))
    return validate(_DataSection, values, named).data


def _section(named: str) -> dict[str, Any] | None:
    """Return the section of a kind, a file or a folder; None for an experiment."""
    if named in DATA or ":" in named:
        return {"kind": named}
    kind = next((kind for kind, ends in _BY_SUFFIX.items() if named.lower().endswith(ends)), None)
    if kind is not None:
        return {"kind": kind, "path": named}
    try:
        folder = located(Path(named), "path")
    except UserError:
        return None
    if not folder.is_dir():
        return None
    is_hugging_face = any((folder / name).is_file() for name in _HUGGING_FACE)
    return {"kind": "hugging_face" if is_hugging_face else "image_folder", "path": named}


def described(data: Dataset) -> list[tuple[str, str]]:
    """Return the names and values of what a person wants to know of a data set before a run."""
    examples = data.examples
    rows = [("name", data.name), ("source", data.source)]
    rows += [(name.replace("_", " "), f"{size:,}") for name, size in data.sizes.items()]
    if isinstance(data, Samples):
        rows.append(("features", shapes(data.train.features)))
        rows.append(("targets", data.targets))
        if data.targets == "classes":
            rows.append(("classes per client", _spread(classes_held(data))))
    else:
        rows.append(("clients", f"{data.n_clients:,}"))
    rows.append(("training examples per client", _spread(examples)))
    if empty := int((examples == 0).sum()):
        rows.append(("clients without examples", f"{empty:,}"))
    return rows


def each_partition(source: DataSource, say: Callable[[str], object]) -> Iterator[tuple[str, Dataset]]:
    """Yield the data set under each partition with its default fields; `say` gets a line for one that does not fit.

    Raise `UserError` if the data set has no partition.
    """
    if not isinstance(source, BaseModel) or "partition" not in type(source).model_fields:
        raise UserError(f"{source.kind} has a client for each user, and no other partition; omit --every-partition")
    for kind, partition in PARTITIONS.items():
        partitioned: Any = source.model_copy(update={"partition": partition()})
        try:
            yield kind, partitioned.load()
        except UserError as error:
            say(f"without {kind}: {error}")


def _spread(counts: IntArray) -> str:
    return f"{np.min(counts):,} to {np.max(counts):,}, median {np.median(counts):,.0f}"
