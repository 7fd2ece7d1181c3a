"""Ids of users or items in several files, as numbers from 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from narrowcast.platform.data.rating_table import RatingTable
from narrowcast.platform.types import IntArray


@dataclass(frozen=True)
class NumberedIds:
    """Ids of all files, numbered in ascending order: as whole numbers if all are, else as text.

    Shapes: numbers[field] [n] are those of the rows of a file; `ids` are their names in messages.
    """

    numbers: Mapping[str, IntArray]
    ids: Sequence[str]

    @classmethod
    def of(cls, tables: Mapping[str, RatingTable], field: str) -> Self:
        """Number the ids of one column of all files."""
        coded = {name: table.ids(field) for name, table in tables.items()}
        texts = pa.concat_arrays([each.dictionary for each in coded.values()]).unique()
        try:
            whole = texts.cast(pa.int64())
            are_whole = whole.cast(pa.string()).equals(texts)
        except pa.ArrowInvalid:
            are_whole = False
        ids = texts.take(pc.sort_indices(whole if are_whole else texts))
        numbers = {
            name: pc.index_in(each.dictionary, ids).to_numpy().astype(np.int64)[each.indices.to_numpy()]
            for name, each in coded.items()
        }
        return cls(numbers, ids.to_pylist())
