"""A tracking store's SQLite file is made whole, whatever ends the process that makes it."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
from pathlib import Path

import pytest

from narrowcast.platform.config.run_fields import StoreAddress
from narrowcast.platform.tracking import store
from narrowcast.platform.tracking.sender import check_store

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


def _die_while_making(uri: str) -> None:
    """Leave some tables, as a process does that is killed between two migrations."""

    def some_tables(path: Path) -> None:
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE issues (id INTEGER)")
        os._exit(9)

    store._with_tables = some_tables
    store.make_sqlite_file(uri)


@pytest.mark.slow
def test_a_store_that_was_being_made_by_a_killed_process_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no store yet"))
    path = tmp_path / "deep" / "mlflow.db"
    killed = multiprocessing.get_context("fork").Process(target=_die_while_making, args=(f"sqlite:///{path}",))
    killed.start()
    killed.join()
    assert killed.exitcode == 9
    assert [each.name for each in path.parent.iterdir()] == ["mlflow.db.part"]
    check_store(StoreAddress(f"sqlite:///{path}"))
    assert [each.name for each in path.parent.iterdir()] == ["mlflow.db"]


@pytest.mark.slow
def test_a_store_is_copied_from_the_cache_unless_that_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, copied, anew = (tmp_path / f"{name}.db" for name in ("first", "copied", "anew"))
    store.make_sqlite_file(f"sqlite:///{first}")
    store.make_sqlite_file(f"sqlite:///{copied}")
    assert copied.read_bytes() == first.read_bytes()
    (kept,) = (tmp_path / "cache" / "narrowcast").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    made: list[Path] = []
    monkeypatch.setattr(store, "_with_tables", lambda path: (made.append(path), path.write_bytes(b"tables")))
    store.make_sqlite_file(f"sqlite:///{anew}")
    assert made
    assert anew.read_bytes() == b"tables"


def test_a_store_in_place_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    path.write_bytes(b"a database")
    store.make_sqlite_file(f"sqlite:///{path}")
    assert path.read_bytes() == b"a database"
