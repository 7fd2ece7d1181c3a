"""Papers: how they are found, what looking at them runs, and a comparison that a file declares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from command_line import assert_refused, narrowcast
from narrowcast.platform.errors import UserError
from narrowcast.studies.comparison import FinishedCell, cells_of
from narrowcast.studies.execution import light_run
from narrowcast.studies.results import Rows, append, read_rows
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.targets import find_targets
from narrowcast.studies.verdicts import accuracies
from papers import PAPERS, targets, without_papers

EXAMPLES = PAPERS.parent / "docs" / "examples"
_TARGET = "source: here\ntargets:\n  mine:\n    what: a table\n    takes: 1 s\n    entry: code:TABLE\n"
_CODE = """
from pathlib import Path
from narrowcast.studies import PaperVerdict, RecordedTable
Path("ran").touch()
TABLE = RecordedTable(lambda results, path: ([PaperVerdict("a", "1", "1", "agrees")], []))
"""


def paper(folder: Path, code: str = _CODE, target: str = _TARGET) -> Path:
    folder.mkdir(parents=True)
    (folder / "targets.yaml").write_text(target)
    (folder / "code.py").write_text(code)
    return folder


def command(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "narrowcast", *map(str, words)], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_every_paper_of_the_checkout_has_its_tables_and_readable_results() -> None:
    for target in targets().values():
        assert target.table() is not None
        assert target.source and target.fields.takes
    for folder in {target.results for target in targets().values() if target.results.is_dir()}:
        rows = read_rows([folder])
        assert all(digest for found in rows.by_label.values() for _, digest, _ in found), folder


@pytest.mark.slow
def test_listing_reads_yaml_and_reproducing_runs_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paper(tmp_path / "papers" / "mine")
    monkeypatch.chdir(tmp_path)
    listed = narrowcast("reproduce", "--list")
    assert (listed.status, listed.err) == (0, "")
    assert "a table" in listed.out and "here" in listed.out
    assert "mine" in narrowcast("list", "target").out
    assert not (tmp_path / "ran").exists()
    done = command("reproduce", "mine", "--output", "out", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "agrees" in done.stdout and (tmp_path / "ran").exists()


@pytest.mark.parametrize("words", [(), ("colr-table4",), ("--list",)])
def test_without_papers_one_line_says_what_to_install(words: tuple[str, ...], tmp_path: Path) -> None:
    said = without_papers(tmp_path, "-m", "narrowcast", "reproduce", *words)
    assert said.returncode == 2, said
    assert said.stderr.count("\n") == 1 and "pip install narrowcast-papers" in said.stderr


@pytest.mark.parametrize(
    ("target", "code", "phrases"),
    [
        (_TARGET.replace("entry: code:TABLE", "entry: nothing:TABLE"), _CODE, ["mine.entry", "No module named"]),
        (_TARGET.replace("code:TABLE", "code:NONE"), _CODE, ["mine.entry", "has no table NONE"]),
        (_TARGET.replace("    entry: code:TABLE\n", ""), _CODE, ["targets.mine", "give entry"]),
        (_TARGET.replace("takes", "took"), _CODE, ["targets.mine", "took"]),
    ],
)
def test_a_wrong_file_is_one_line(target: str, code: str, phrases: list[str], tmp_path: Path) -> None:
    folder = paper(tmp_path / "paper", code, target)
    assert_refused(narrowcast("reproduce", "mine", "--papers", folder, "--output", tmp_path / "out"), *phrases)


_COMPARED = (EXAMPLES / "paper" / "targets.yaml").read_text()


@pytest.mark.parametrize(
    ("wrong", "phrases"),
    [
        (_COMPARED.replace("mu: 0.1", "mew: 0.1"), ["mew", "mu"]),
        (_COMPARED.replace("fedavg-digits", "fedavg-digit"), ["fedavg-digit"]),
        (_COMPARED.replace("cells:", "axes:"), ["comparison"]),
        (_COMPARED.replace("metric: accuracy", "metric: rmse"), ["comparison.metric", "rmse", "hr@10"]),
        (_COMPARED.replace("metric: accuracy", "metric: attack.success"), ["attack.success", "FedAvg", "no attack"]),
        (
            _COMPARED.replace("metric: accuracy", "metric: attack.success\n      until: 0.1"),
            ["attack.success", "better when lower"],
        ),
        (_COMPARED.replace("FedProx: [", "fed-avg: [").replace("FedAvg:", "Fed Avg:"), ["names of cells"]),
    ],
)
def test_a_wrong_comparison_is_one_line_before_anything_runs(wrong: str, phrases: list[str], tmp_path: Path) -> None:
    folder = paper(tmp_path / "paper", target=wrong)
    words = ("reproduce", "proximal-digits", "--papers", folder, "--output", tmp_path / "out")
    assert_refused(narrowcast(*words), *phrases)
    assert not (tmp_path / "out").exists()


_AXES = """source: here
targets:
  mine:
    what: a table
    takes: 1 s
    entry: code:TABLE
    comparison:
      experiment: fedavg-digits
      axes:
        data:
          alike: {partition: iid}
          "0.3": {partition: "{kind: dirichlet, alpha: $data}", rate: [0.01, 0.02]}
        method:
          FedAvg: {algorithm: fedavg}
          Fed Prox: {algorithm: "{kind: fedprox, mu: $mu}", mu: [0, 1]}
      without: [{data: alike, method: Fed Prox}]
      grid:
        mu: [0]
        rate: [0.1]
        training.epochs: [1, 2]
      least: {mu: 0}
      overrides: ["data.partition=$partition", algorithm=$algorithm, training.learning_rate=$rate]
"""


def test_cells_are_the_combinations_of_axes_with_their_fields_in_the_texts(tmp_path: Path) -> None:
    fields = find_targets(paper(tmp_path / "paper", target=_AXES))["mine"].fields
    assert fields.comparison is not None
    alike, skewed, proximal = cells_of(fields.comparison, "mine")
    assert [cell.key for cell in (alike, skewed, proximal)] == [
        ("alike", "FedAvg"),
        ("0.3", "FedAvg"),
        ("0.3", "Fed Prox"),
    ]
    assert alike.grid == ((0.0, 0.1, 1.0), (0.0, 0.1, 2.0))
    assert len(proximal.grid) == 2 * 2 * 2
    run = proximal.tuning(proximal.grid[-1])
    assert run.label == "mine-0.3-fed-prox-tuning-1-0.02-2"
    assert run.overrides == (
        *("data.partition={kind: dirichlet, alpha: 0.3}", "algorithm={kind: fedprox, mu: 1}"),
        *("training.learning_rate=0.02", "training.epochs=2"),
    )
    assert proximal.name == "0.3, Fed Prox"
    found = [{"final": {"validation.accuracy": float(place == 1)}} for place in range(8)]
    choices = {choice.name: choice.at_edge for choice in FinishedCell(proximal, found, []).choices}
    assert choices == {"mu": False, "rate": True, "training.epochs": True}


def test_a_paper_judges_the_cells_of_its_comparison(tmp_path: Path) -> None:
    (folder := tmp_path / "paper").mkdir()
    (folder / "targets.yaml").write_text(_AXES.replace("code:TABLE", "own_verdicts:TABLE"))
    (folder / "own_verdicts.py").write_text("""
from narrowcast.studies import ComparisonVerdicts, PaperVerdict
TABLE = ComparisonVerdicts(lambda tested: [PaperVerdict(str(len(tested)), "", "", "")], lambda tested, path: None)
NONE = 1
""")
    table = find_targets(folder)["mine"].table()
    assert isinstance(table, StudyTable)
    assert table.judge(Rows())[0].what == "0"
    (folder / "targets.yaml").write_text(_AXES.replace("code:TABLE", "own_verdicts:NONE"))
    with pytest.raises(UserError, match="own_verdicts has no ComparisonVerdicts NONE"):
        find_targets(folder)["mine"].table()


_ATTACKED = """source: here
targets:
  mine:
    what: a table
    takes: 1 s
    comparison:
      experiment: fedavg-digits
      metric: attack.success
      overrides: [rounds=2, evaluate_every=2, "attack={kind: trigger, size: 2, attackers: 5}"]
      cells: {mean: [], median: [algorithm.aggregator=median]}
      grid: {training.learning_rate: [0.001, 0.1]}
      seeds: 2
      tuning_seeds: 1
"""


def test_cells_are_compared_by_the_success_of_an_attack_and_tuned_on_validation(tmp_path: Path) -> None:
    table = find_targets(paper(tmp_path / "paper", target=_ATTACKED))["mine"].table()
    assert isinstance(table, StudyTable)
    kept, rows = tmp_path / "rows.csv", Rows()
    for _ in range(2):  # runs on validation, and then those on test
        for planned in table.plans["mine"](rows):
            if (planned.spec, planned.seed) not in rows:
                append(kept, planned.spec, planned.seed, light_run(planned.spec, planned.seed, test=planned.test))
        rows = read_rows([tmp_path])
    assert all("attack.success" not in each["final"] for each in rows.of_stem("mine-mean-tuning"))
    tested = [*rows.of_stem("mine-mean-0.1"), *rows.of_stem("mine-median-0.1")]  # 0.001 has less accuracy and success
    assert len(tested) == 4
    verdicts = table.judge(rows)
    assert [verdict.by_seed for verdict in verdicts[:2]] == [
        tuple(100 * each["final"]["attack.success"] for each in tested[place : place + 2]) for place in (0, 2)
    ]
    assert accuracies([{"final": {}, "error": "diverged"}], "attack.success") == (100.0,)
    with pytest.raises(UserError, match=r"no attack\.success"):
        accuracies([{"final": {"test.accuracy": 0.5}}], "attack.success")


def test_a_folder_without_papers_is_refused(tmp_path: Path) -> None:
    assert_refused(narrowcast("reproduce", "--list", "--papers", tmp_path), "no targets.yaml")


def test_an_installed_package_announces_its_papers(tmp_path: Path) -> None:
    package, info = paper(tmp_path / "my_papers" / "one").parent, tmp_path / "my_papers-1.dist-info"
    (package / "__init__.py").write_text("raise SystemExit('looking must not run this')\n")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-papers\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[narrowcast.papers]\nmy_papers = my_papers\n")
    (alone := tmp_path / "alone").mkdir()
    list_targets = "from narrowcast.studies.targets import find_targets; print(*find_targets())"
    said = without_papers(alone, "-c", list_targets, path=str(tmp_path))
    assert said.stdout.split() == ["mine"]


@pytest.mark.slow
def test_the_template_runs_keeps_its_rows_and_draws_them_again(tmp_path: Path) -> None:
    folder = tmp_path / "paper"
    folder.mkdir()
    for file in (EXAMPLES / "paper").glob("*.*"):
        (folder / file.name).write_text(file.read_text())
    assert list(find_targets(folder)) == ["proximal-digits", "dropped-clients"]
    words = ("reproduce", "proximal-digits", "--papers", "paper")
    done = command(*words, "--output", "out", "--keep", "--jobs", 2, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = read_rows([folder / "results"])
    assert len(rows) == 2 * 3 * 2 + 2 * 3
    assert all("test.accuracy" not in each["final"] for each in rows.of_stem("proximal-digits-fedprox-tuning"))
    again = command(*words, "--time-limit", 0, "--output", "again", cwd=tmp_path)
    assert again.stdout.partition("Source")[0] in done.stdout


@pytest.mark.thorough
@pytest.mark.slow
def test_a_study_on_ray_has_the_rows_of_one_in_processes(tmp_path: Path) -> None:
    words = ("reproduce", "proximal-digits", "--papers", EXAMPLES / "paper", "--jobs", 2)
    models = []
    for backend in ("local", "ray"):
        done = command(*words, "--backend", backend, "--output", backend, cwd=tmp_path)
        assert (done.returncode, "18 runs ended, 0 of those" in done.stdout) == (0, True), done.stderr
        rows = read_rows([tmp_path / backend])
        models.append({run: [result["model_sha256"] for *_, result in found] for run, found in rows.by_label.items()})
    assert models[0] == models[1]
    assert len(models[0]) == 18


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        (("dropped-clients", "--backend", "ray"), ["dropped-clients", "--backend ray"]),
        (("proximal-digits", "--address", "auto"), ["--address auto", "--backend ray"]),
        (("proximal-digits", "--backend", "ray", "--address", "127.0.0.1:9"), ["127.0.0.1:9"]),
    ],
)
def test_a_study_that_cannot_run_on_ray_is_one_line(words: tuple[str, ...], phrases: list[str], tmp_path: Path) -> None:
    target, *others = words
    folder = ("--papers", EXAMPLES / "paper", "--output", tmp_path / "out")
    assert_refused(narrowcast("reproduce", target, *folder, *others), *phrases)
    assert not (tmp_path / "out").exists()


def test_the_page_shows_the_template() -> None:
    page = (EXAMPLES.parent / "howto" / "papers-of-your-own.md").read_text()
    for file in (EXAMPLES / "paper").glob("*.*"):
        assert f"# {file.name}\n{file.read_text()}```" in page


def test_nothing_in_the_package_imports_papers() -> None:
    package = PAPERS.parent / "src" / "narrowcast"
    assert not [file for file in package.rglob("*.py") if "narrowcast_papers" in file.read_text()]
