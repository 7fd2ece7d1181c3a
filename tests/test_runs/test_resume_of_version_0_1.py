"""A run folder that version 0.1 wrote, killed after round 3 of 4, resumes to the model that version 0.1 had.

`run_of_version_0_1` holds `config.yaml` and `journal.jsonl` as they were, and the checkpoint of round 2 in base64.
Rounds 3 and 4 count the headers of today.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from command_line import narrowcast
from narrowcast.platform.tracking.journal import Journal
from processor import processor

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # MLflow's store
WRITTEN = Path(__file__).with_name("run_of_version_0_1")
PROCESSOR = "znver4/AVX512"
MODEL_SHA256 = "80c31074c1c87a824eddf807c282fb18478d62fd548aaab910d95ea306b2f5fa"
UPLINK_BITS = DOWNLINK_BITS = 836_800 - 20 * 40  # rounds 3 and 4: 20 messages each way, with headers of today
SIMULATED_SECONDS = 40.056105448567706


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the run's folder, with an MLflow run that has received nothing yet."""
    folder = tmp_path / "digits"
    (folder / "checkpoint").mkdir(parents=True)
    for name in ("config.yaml", "journal.jsonl"):
        (folder / name).write_bytes((WRITTEN / name).read_bytes())
    checkpoint = base64.b64decode((WRITTEN / "checkpoint.base64").read_bytes())
    name = f"round-{2:09d}.{hashlib.sha256(checkpoint).hexdigest()}.safetensors"
    (folder / "checkpoint" / name).write_bytes(checkpoint)
    client = MlflowClient(uri := f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = client.create_run(client.create_experiment("narrowcast"), run_name="digits")
    cursor = {"uri": uri, "run_id": run.info.run_id, "sent_rounds": 0, "closed": False, "status": "FAILED"}
    (folder / "tracking.json").write_text(json.dumps(cursor))
    return folder


def test_it_resumes_to_the_results_of_version_0_1(folder: Path) -> None:
    said = narrowcast("run", "--resume", "digits", "--output", folder.parent)
    assert said.status == 0, said.err
    assert "resuming after round 2" in said.out
    (notice,) = said.err.splitlines()
    assert notice.endswith("config.yaml: executor is now called backend")
    result = json.loads((folder / "result.json").read_text())
    assert (result["rounds"], result["backend"]) == (4, "local")
    assert (result["uplink_bits"], result["downlink_bits"]) == (UPLINK_BITS, DOWNLINK_BITS)
    assert result["simulated_seconds"] == SIMULATED_SECONDS
    if processor() == PROCESSOR:  # float32 sums are ordered differently on others
        assert result["model_sha256"] == MODEL_SHA256
    config = (folder / "config.yaml").read_text()
    assert "executor" not in config
    assert "\nclient_seed: 0\n" in config  # clients keep drawing from the seed that they began with
    before, after = (Journal.open(each).rounds for each in (WRITTEN, folder))
    assert after[:2] == before[:2]
    for row in (before[2], after[2]):  # repeated after the checkpoint of round 2, with the headers of today
        for name in [each for each in row if "bits" in each or "seconds" in each or each == "logged_at_ms"]:
            del row[name]
    assert after[2] == before[2]
    client = MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}")
    losses = client.get_metric_history(result["mlflow_run_id"], "loss")
    assert [(each.step, each.value) for each in losses] == [(row["round"], row["loss"]) for row in after]
