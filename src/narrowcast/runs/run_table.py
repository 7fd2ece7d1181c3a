"""Reading a table of a run's folder, and the advice of errors about such a folder."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from narrowcast.platform.config import command
from narrowcast.platform.errors import UserError
from narrowcast.platform.links import own_file


def read_table(path: Path, needed: tuple[str, ...]) -> pa.Table:
    """Return a Parquet table with the needed columns; raise `UserError` if it is damaged or lacks one."""
    own_file(path.parent, path.name)
    try:
        # Without partitioning=None a folder called lr=0.1 would become a column.
        table = pq.read_table(path, partitioning=None)
        table.validate(full=True)
        names = table.column_names
        for column in table.columns:
            if pa.types.is_integer(column.type):
                column.cast(pa.float64())  # refuses numbers that figures and tables could not show
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        raise UserError(f"{path}: unreadable ({first_line(error)}); run the experiment again") from error
    if missing := [name for name in needed if name not in names]:
        raise UserError(f"{path}: has no column {', '.join(missing)}; run the experiment again")
    return table


def finish_advice(folder: Path) -> str:
    """Return how to finish a run that was begun."""
    resume = command("run", "--resume", folder.name, "--output", folder.parent)
    return f"let it finish or resume it with: {resume}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
