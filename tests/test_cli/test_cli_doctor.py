"""What the doctor says of a healthy machine and of broken ones, and where the wall time of a round went."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from command_line import TINY, narrowcast

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


def findings(*words: object) -> tuple[int, dict[str, str]]:
    """The exit status, and each row of the table by its first cell, joined where it was wrapped."""
    said = narrowcast("doctor", *words)
    rows: dict[str, str] = {}
    name = ""
    for line in said.out.splitlines()[1:]:
        if not line.startswith(" "):
            name = line[:12].strip()
        rows[name] = rows.get(name, "") + " " + " ".join(line[12:].split())
    assert (said.err == "") == (said.status == 0)
    return said.status, rows


def test_a_healthy_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    status, rows = findings("scolr-ml100k", "--output", tmp_path)
    assert status == 0, rows
    assert list(rows) == ["packages", "Ray token", "Ray ports", "ports", "memory", "disk", "data", "MLflow store"]
    assert not any(" WRONG " in row for row in rows.values())
    assert "ml-100k in" in rows["data"]


def test_a_broken_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWCAST_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://alice:pa55@127.0.0.1:9")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    status, rows = findings("scolr-ml100k", "--address", "127.0.0.1:9", "--output", "/proc/runs")
    assert status == 1
    assert " note " in rows["Ray token"]
    assert "narrowcast data fetch ml-100k" in rows["data"]
    assert "***@127.0.0.1:9" in rows["MLflow store"]
    assert "pa55" not in str(rows)
    assert {name for name, row in rows.items() if " WRONG " in f"{row} "} == {"disk", "data", "MLflow store", "cluster"}


@pytest.mark.slow
def test_the_parts_of_a_round_add_up_and_its_record_names_its_clients(tmp_path: Path) -> None:
    said = narrowcast("--log-format", "json", "run", *TINY, "--output", tmp_path)
    assert said.status == 0, said.err
    rounds = pq.read_table(tmp_path / "scolr-ml100k" / "rounds.parquet").to_pylist()
    for row in rounds:
        parts = [row[f"{part}_wall_seconds"] for part in ("broadcast", "train", "encode", "aggregate", "evaluate")]
        assert sum(parts) == pytest.approx(row["round_wall_seconds"])
        assert min(parts) >= 0
        assert row["encode_wall_seconds"] > 0
    assert rounds[-1]["log_wall_seconds"] > 0
    records = [json.loads(line) for line in said.err.splitlines()]
    assert [record["round"] for record in records] == [1, 2]
    for record in records:
        assert (record["level"], record["run"], len(record["clients"])) == ("info", "scolr-ml100k", 60)
        assert set(record["delivered"]) <= set(record["clients"])
