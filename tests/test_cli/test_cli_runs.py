"""Good input on the command line: what the commands print, and what a run leaves in its folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from command_line import TINY, assert_refused, narrowcast, run_folders, terminated_after
from narrowcast import __version__
from narrowcast.experiment import load_experiment
from sampling import sampled

# MLflow's queries make SQLAlchemy warn.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
RESULT_KEYS = {
    *("name", "algorithm", "data", "backend", "execution", "final", "best", "rounds", "uplink_bits", "downlink_bits"),
    "data_sha256",
    *("full_uplink_bits", "simulated_seconds", "wall_seconds", "model_sha256", "mlflow_run_id", "seed", "git_commit"),
    "targets",
    "baselines",
    "lower_is_better",
    "shares",
    *("narrowcast_version", "total_bits", "touched_uplink_bits"),
}
FILES = {
    *("config.yaml", "rounds.parquet", "clients.parquet", "journal.jsonl", "result.json", "tracking.json"),
    "model.safetensors",
    "checkpoint",
    "partition/partition.parquet",
    "partition/partition.png",
    *(f"plots/accuracy_{cost}.png" for cost in ("round", "time", "total", "uplink")),
    *(f"plots/{name}.png" for name in ("client_bits_ranks", "loss_time")),
}
METRICS = {f"{split}.{metric}@10" for split in ("validation", "test") for metric in ("hr", "ndcg")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with the run `low` of rank 2."""
    output = tmp_path_factory.mktemp("runs")
    assert narrowcast("run", *TINY, "--output", output, "name=low", "algorithm.rank=2").status == 0
    return output


def result(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "result.json").read_text()))


@pytest.mark.usefixtures("drawn")
def test_a_run_prints_its_result_and_leaves_its_files(runs: Path) -> None:
    said = narrowcast("run", *TINY, "--output", runs, "name=whole", "evaluate_every=1")
    assert (said.status, said.err) == (0, "")
    folder = runs / "whole"
    paths = {path for path in folder.rglob("*") if path.is_file()}
    # Checkpoints are named after their content.
    assert {
        str((path.parent if path.parent.name == "checkpoint" else path).relative_to(folder)) for path in paths
    } == FILES

    got = result(folder)
    assert set(got) == RESULT_KEYS
    assert set(got["final"]) == METRICS | {"loss"}
    assert set(got["best"]) == METRICS
    expected = {"name": "whole", "algorithm": "scolr", "data": "ml-100k", "backend": "local", "rounds": 2, "seed": 0}
    assert {key: got[key] for key in expected} == expected
    for digest in ("model_sha256", "data_sha256"):
        assert re.fullmatch(r"[0-9a-f]{64}", got[digest])
    assert re.fullmatch(r"[0-9a-f]{32}", got["mlflow_run_id"])

    rounds, clients = pq.read_table(folder / "rounds.parquet"), pq.read_table(folder / "clients.parquet")
    assert (rounds.num_rows, clients.num_rows) == (2, 120)
    assert sum(clients["uplink_bits"].to_pylist()) == got["uplink_bits"] == rounds["total_uplink_bits"][1].as_py()
    assert load_experiment(str(folder / "config.yaml")).name == "whole"

    lines = said.out.splitlines()
    assert lines[0] == "whole: scolr on ml-100k, model matrix_factorisation, 2 rounds, backend local"
    assert lines[1].startswith("ml-100k: recommendation, ")
    assert lines[2] == "whole: 2 rounds"
    assert re.match(r"round 2/2  test HR@10 \d+\.\d\d %  loss ", lines[4])
    table = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines[5:-1])
    assert table["test HR@10"].startswith(f"{100 * got['final']['test.hr@10']:.2f} % (")
    assert f"({got['uplink_bits']:,} bits)" in table["uplink"]
    assert table["model sha256"] == got["model_sha256"][:12]
    assert table["plots"] == str(folder / "plots")
    assert got["mlflow_run_id"] in table["MLflow"]
    assert lines[-1].strip() == f"open it with: narrowcast ui --output {runs}"


@pytest.mark.slow
def test_figures_are_left_out_if_asked(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWCAST_FIGURES", "never")
    said = narrowcast("run", *TINY, "--output", runs, "name=bare")
    assert (said.status, said.err) == (0, "")
    assert "plots" not in said.out
    assert not [*(runs / "bare").rglob("*.png")]
    assert (runs / "bare" / "partition" / "partition.parquet").is_file()
    monkeypatch.setenv("NARROWCAST_FIGURES", "no")
    said = narrowcast("run", *TINY, "--output", runs, "name=neither")
    assert (said.status, len(said.err.splitlines())) == (2, 1)
    assert "NARROWCAST_FIGURES = no: give always, or never" in said.err


@pytest.mark.slow
def test_two_runs_are_compared_in_a_table_and_a_plot(runs: Path) -> None:
    assert narrowcast("run", *TINY, "--output", runs, "name=high").status == 0
    said = narrowcast("compare", "low", runs / "high", "--output", runs)
    assert (said.status, said.err) == (0, "")
    lines = [line for line in said.out.splitlines() if line.strip()]
    traffic = next(place for place, line in enumerate(lines) if "less traffic" in line)
    compared, beside = ({line.split()[0]: line for line in part} for part in (lines[:traffic], lines[traffic:]))
    for name in ("low", "high"):
        its = result(runs / name)
        assert f"{100 * its['final']['test.hr@10']:.2f} %" in compared[name]
        assert f"{its['touched_uplink_bits'] / its['uplink_bits']:,.1f}x" in beside[name]
    rows = {line.split()[0]: line for line in lines}
    assert rows["plot"].split() == ["plot", str(runs / "compare.png")]
    assert (runs / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert narrowcast("compare", "low", "--output", runs, "--plot", runs / "one.svg").status == 0
    assert "<svg" in (runs / "one.svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "clients", "ranks"),
    sampled(
        [
            ALL_CLIENTS := (["clients_per_round=943"], 943, range(17)),
            (["clients_per_round=1"], 1, range(17)),
            (["rounds=1"], 60, range(17)),
            (["algorithm.rank=1"], 60, [0, 1]),
            (["algorithm.rank=64"], 60, range(65)),
            (["algorithm={kind: colr, rank: 1}"], 60, [1]),
            FULL_RANK := (["algorithm={kind: colr, rank: 64}"], 60, [64]),
            (["model.embedding_dim=1", "algorithm.rank=1"], 60, [0, 1]),
            SCALARS := (["algorithm=fedmf", "model.embedding_dim=1"], 60, [1]),
        ],
        [ALL_CLIENTS, FULL_RANK, SCALARS],
    ),
)
def test_extreme_runs_reach_their_end(runs: Path, settings: list[str], clients: int, ranks: list[int]) -> None:
    before = run_folders(runs)
    said = narrowcast("run", *TINY, "--output", runs, *settings)
    assert (said.status, said.err) == (0, "")
    (name,) = set(run_folders(runs)) - set(before)
    ledger = pq.read_table(runs / name / "clients.parquet")
    assert ledger.num_rows == clients * result(runs / name)["rounds"]
    assert set(ledger["rank"].to_pylist()) <= set(ranks)
    assert all(0 <= value <= 1 for key, value in result(runs / name)["final"].items() if key in METRICS)


@pytest.mark.slow
def test_a_taken_name_is_numbered(runs: Path, tmp_path: Path) -> None:
    for _ in range(2):
        said = narrowcast("run", *TINY, "--output", tmp_path, "rounds=1", f"tracking.uri=sqlite:///{runs}/mlflow.db")
        assert said.status == 0
    assert run_folders(tmp_path) == ["scolr-ml100k", "scolr-ml100k-2"]
    assert len({result(folder)["model_sha256"] for folder in tmp_path.iterdir()}) == 1


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_end(runs: Path) -> None:
    words = ("--output", runs, "checkpoint_every=2")
    with terminated_after(3, runs / "torn"):
        said = narrowcast("run", *TINY, "name=torn", "rounds=1000000", *words)
    assert_refused(said, f"interrupted; resume with: narrowcast run --resume torn --output {runs}", status=1)
    assert not (runs / "torn" / "result.json").exists()
    rounds = (runs / "torn" / "journal.jsonl").read_bytes().count(b"\n") + 2

    said = narrowcast("run", "--resume", "torn", *words, f"rounds={rounds}")
    assert (said.status, said.err) == (0, "")
    assert "resuming after round" in said.out
    assert narrowcast("run", *TINY, "name=straight", f"rounds={rounds}", *words).status == 0
    torn, straight = result(runs / "torn"), result(runs / "straight")
    for each in (torn, straight):
        for name in ("name", "wall_seconds", "mlflow_run_id", "git_commit"):
            del each[name]
    assert torn == straight


@pytest.mark.slow
def test_a_run_that_cannot_write_fails_with_advice(runs: Path) -> None:
    folder = runs / "low"
    (folder / "rounds.parquet").unlink()
    (folder / "rounds.parquet").mkdir()
    words = ("run", "--resume", "low", "--output", runs)
    said = narrowcast(*words)
    advice = f"remove what has the place of a file, then resume the run [narrowcast run --resume low --output {runs}]"
    assert_refused(said, f"cannot write to {folder} (", advice, status=1)
    (folder / "rounds.parquet").rmdir()
    assert narrowcast(*words).status == 0


@pytest.mark.slow
def test_what_show_prints_is_what_run_takes(runs: Path, tmp_path: Path) -> None:
    said = narrowcast("show", "scolr-ml100k", "algorithm.rank=4", "rounds=1", "tracking.system_metrics=false")
    assert (said.status, said.err) == (0, "")
    path = tmp_path / "mine.yaml"
    path.write_text(said.out)
    assert narrowcast("show", path).out == said.out
    assert "rank: 4" in said.out
    words = ("--backend", "local", "--output", tmp_path, f"tracking.uri=sqlite:///{runs}/mlflow.db")
    assert narrowcast("run", path, *words).status == 0
    assert result(tmp_path / "scolr-ml100k")["rounds"] == 1


def test_show_lists_the_packaged_experiments() -> None:
    said = narrowcast("show")
    assert (said.status, said.err) == (0, "")
    rows = [line.split(maxsplit=1) for line in said.out.splitlines()[1:]]
    names = [words[0] for words in rows if words[0].endswith(("ml1m", "ml100k"))]
    assert names == [
        *("colr-ckks-ml1m", "colr-ml1m", "fedmf-ml1m", "scolr-channel-ml1m"),
        *("scolr-masked-ml1m", "scolr-ml100k", "scolr-ml1m", "ratings-ml100k"),
    ]


def test_data_list_says_where_each_set_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWCAST_DATA", str(tmp_path))
    monkeypatch.setenv("HOME", "/h")
    (tmp_path / "ml-1m").mkdir()
    (tmp_path / "ml-1m" / "ratings.dat").touch()
    said = narrowcast("data", "list")
    assert (said.status, said.err) == (0, "")
    assert said.out.splitlines()[-1] == f"searched in {tmp_path}, then /h/.cache/narrowcast/data"
    words = " ".join(said.out.split())
    assert all(phrase in words for phrase in ("ml-100k", "ml-1m", "ml-latest-small", "GroupLens", "no: narrowcast"))
    assert narrowcast("data", "fetch", "ml-1m").out == f"ml-1m is in {tmp_path}/ml-1m\n"


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        (["--help"], ["narrowcast run scolr-ml100k algorithm.rank=16     run it with another rank\n", "sync  "]),
        (["-h"], ["Communication-constrained", "export  ", "run  ", "show  ", "compare  ", "data  ", "ui  "]),
        (["run", "-h"], ["[EXPERIMENT] [A.B=VALUE]...", "--resume", "--address", "--backend [local|ray]"]),
        (["show", "-h"], ["List the packaged experiments", "with all defaults filled"]),
        (["export", "-h"], ["Write the trained global model", "--format [safetensors|torch]"]),
        (["compare", "-h"], ["Compare finished runs by accuracy, bits and time", "--plot"]),
        (["data", "-h"], ["List, download and inspect data sets", "fetch  ", "list  ", "show  "]),
        (["data", "list", "-h"], ["licences"]),
        (["data", "fetch", "-h"], ["Download the data set NAME, check it and unpack it"]),
        (["ui", "-h"], ["Open the MLflow UI", "--port"]),
        (["sync", "-h"], ["Send the metrics of RUN that MLflow does not have", "--tracking-uri"]),
        (["--version"], [__version__]),
    ],
)
def test_every_command_says_what_it_does(words: list[str], phrases: list[str]) -> None:
    said = narrowcast(*words)
    assert (said.status, said.err) == (0, "")
    assert all(phrase in said.out for phrase in phrases), said.out


@pytest.mark.parametrize("words", [[], ["data"]])
def test_a_group_alone_shows_its_commands(words: list[str]) -> None:
    said = narrowcast(*words)
    assert said.status == 2
    assert (said.out + said.err).startswith("Usage: narrowcast")
    assert "Commands:" in said.out + said.err
