"""A study that version 0.1 began: its keys, its storage and its folder are still read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from command_line import narrowcast
from studies import result, trials

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

STUDY = """
experiment:
  base: fedavg-digits
  rounds: 4
  evaluate_every: 2
  data: {clients: 40}
  tracking: {system_metrics: false}
study:
  objectives: {validation.loss: minimize, uplink_bits: minimize}
  trials: 3
  executor: local
  retest: {trials: 1, seeds: 1}
  pruner: {kind: median, on: validation.loss}
  patience_seconds: 50
space:
  training.learning_rate: {kind: float, low: 0.001, high: 1, log: true}
"""


def test_a_study_of_version_0_1_continues(tmp_path: Path) -> None:
    """Two of its trials are complete; the process of the third was killed on another machine."""
    (tmp_path / "digits.yaml").write_text(STUDY)
    folder = tmp_path / "digits"
    (folder / "retest").mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("study_of_0_1.journal"), folder / "study.journal")
    settings = ("study.retest.seeds=2", "study.stale_seconds=5")
    said = narrowcast("tune", tmp_path / "digits.yaml", "--output", tmp_path, *settings)
    assert said.status == 0, said.err
    for former, now in (
        ("executor", "backend"),
        ("retest", "holdout"),
        ("patience_seconds", "storage_timeout_seconds"),
    ):
        assert f"study.{former} is now study.{now}" in said.err
    rows = trials(folder)
    assert [row["state"] for row in rows] == ["complete", "complete", "lost", "complete"]
    assert [row["rounds"] for row in rows] == ["4", "4", "0", "4"]
    assert float(rows[0]["validation.loss"]) == 2.263613806830512
    assert (rows[3]["retry_of"], rows[3]["training.learning_rate"]) == ("2", rows[2]["training.learning_rate"])
    assert len(result(folder)["holdout"][0]["runs"]) == 2
    assert "\nclient_seed: 0\n" in (folder / "best.yaml").read_text()  # its clients draw from the seed, as they did
    assert len(list((folder / "holdout").iterdir())) == 2
    assert not (folder / "retest").exists()
    said = narrowcast("verify", folder)
    assert said.status == 0, said.out + said.err
    assert "not checked: trials 0, 1 have no files here" in " ".join(said.out.split())
