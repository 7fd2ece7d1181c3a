"""Forged runs, solves, studies and benchmarks do not pass `narrowcast verify`, and the originals do.

These are some of the hundred of `benchmarks/forged_folders.py`: of each kind of folder, those that are hardest to find.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from command_line import assert_refused, narrowcast
from forged_benchmarks import FINISHED
from forged_folders import KINDS
from narrowcast.runs.checks import Budget

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
FORGED: Mapping[tuple[str, str], str] = {
    ("run", "accuracy everywhere"): "model of round 12: test.accuracy is ",
    ("run", "accuracy of an earlier round everywhere"): "repeated, test.accuracy is ",
    ("run", "losses of clients and of their round everywhere"): "repeated, loss is ",
    ("run", "metrics of clients and their statistics everywhere"): "repeated, test.accuracy.",
    ("run", "uplink of clients and all sums everywhere"): "uplink_bits is ",
    ("run", "model, checkpoint and sha256"): "model of round 12: ",
    ("run", "model, checkpoint, sha256 and its figures"): "repeated, ",
    ("run", "seed in config.yaml, checkpoint and result.json"): "round 1: repeated, ",
    ("solve", "error everywhere"): "repeated, test.relative_error is ",
    ("solve", "time of the solver everywhere"): "sums: iteration 1: solver_seconds is not the sum",
    ("solve", "answer, sha256, checkpoint and its figures"): "repeated, ",
    ("study", "accuracy of the chosen trial everywhere"): "run again, validation.accuracy is ",
    ("study", "accuracy of another trial everywhere"): "run again, validation.accuracy is ",
    ("study", "rate of the chosen trial everywhere"): "run again, loss is ",
    ("study", "hold-out result everywhere"): "run again, test.accuracy is ",
    ("study", "sha256 of a trial's model"): "its model_sha256 is not that of the trial when run again",
    ("benchmark", "answer, sha256 and its figures everywhere"): "repeated, observed_error is ",
    ("benchmark", "error in the table"): "instances.csv: completion.",
    ("benchmark", "the run of another solver"): "it is not the instance of benchmark.yaml",
    ("benchmark", "a finished solve said to be skipped"): "it was skipped, and its solver takes the problem",
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: kind.make(tmp_path_factory.mktemp(name)) for name, kind in KINDS.items()}


@pytest.mark.slow
def test_the_originals_pass_whatever_is_repeated(originals: dict[str, Path]) -> None:
    for name, kind in KINDS.items():
        for steps, seed in ((0, 0), (3, 1), (3, 2), (None, 0)):
            assert kind.found(originals[name], steps, seed) == [], name


@pytest.mark.parametrize(("kind", "forgery"), FORGED, ids=" ".join)
def test_a_forged_folder_is_found(originals: dict[str, Path], kind: str, forgery: str, tmp_path: Path) -> None:
    folder = KINDS[kind].forged(originals[kind], forgery, tmp_path)
    found = KINDS[kind].found(folder, None)
    assert any(FORGED[kind, forgery] in problem for problem in found), found


def test_a_benchmark_that_is_continued_and_killed_has_no_problem(originals: dict[str, Path], tmp_path: Path) -> None:
    """Its table is then older than its last solves, and an end may not be noted."""
    folder = Path(shutil.copytree(originals["benchmark"], tmp_path / "benchmark"))
    table, ends = folder / "instances.csv", folder / "instances.jsonl"
    header, first, *others = table.read_text().splitlines()
    waiting = [",".join([*line.split(",")[:4], "waiting", *[""] * (header.count(",") - 4)]) for line in others]
    table.write_text("\n".join([header, first, *waiting, ""]))
    lines = ends.read_text().splitlines(keepends=True)
    ends.write_text("".join(line for line in lines if FINISHED[-1] not in line or "begun" in line))
    assert KINDS["benchmark"].found(folder, 0) == []
    table.write_text(table.read_text().replace(",finished,", ",failed,"))
    assert KINDS["benchmark"].found(folder, 0) == [f'instances.csv: {FINISHED[0]}: state is "failed", not "finished"']


def test_there_are_a_hundred_forgeries() -> None:
    assert [len(kind.forgeries) for kind in KINDS.values()] == [25] * 4
    assert all(forgery in KINDS[kind].forgeries for kind, forgery in FORGED)


@pytest.mark.slow
def test_the_command_takes_a_study_and_a_benchmark(originals: dict[str, Path], tmp_path: Path) -> None:
    for name in ("study", "benchmark"):
        said = narrowcast("verify", name, "--output", originals[name].parent)
        assert (said.status, said.err) == (0, "")
        assert f"{name}: what was checked" in said.out
    folder = KINDS["study"].forged(originals["study"], "rounds in result.json", tmp_path)
    said = narrowcast("verify", folder, "--rounds", "0")
    assert_refused(said, "checks failed; the first is result.json: rounds_run is 1000000, not 24", status=1)
    before = sorted(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert narrowcast("verify", folder).status == 1
    assert sorted(path.read_bytes() for path in folder.rglob("*") if path.is_file()) == before  # nothing is written


def test_without_their_classes_tables_and_sums_are_checked(originals: dict[str, Path], tmp_path: Path) -> None:
    """As of a study or a benchmark that names code of its own, in a folder that is not trusted."""
    for name, section in (("study", "experiment"), ("benchmark", "solvers")):
        folder = Path(shutil.copytree(originals[name], tmp_path / name))
        file = folder / f"{name}.yaml"
        file.write_text(
            file.read_text().replace(f"{section}:\n", f"{section}:\n  own: {{kind: 'own_module:Own'}}\n", 1)
        )
        said = narrowcast("verify", folder)
        assert said.status == 0, said.err
        assert f"own_module:Own is code of the {name}'s own" in " ".join(said.out.split())
    table = tmp_path / "study" / "trials.csv"
    table.write_text(table.read_text().replace("complete", "pruned", 1))
    assert_refused(narrowcast("verify", tmp_path / "study"), "trials.csv: trial 0: state is ", status=1)


def test_a_study_without_its_journal_or_a_trial_says_so(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals["study"], tmp_path / "study"))
    (folder / "study.journal").unlink()
    shutil.rmtree(folder / "holdout")
    checks = {check.subject: check for check in KINDS["study"].verify(folder, Budget(0))}
    assert checks["study.journal"].skipped.startswith("the study's storage is elsewhere")
    assert [check.subject for check in checks.values() if check.problem] == ["result.json"]  # it has hold-out results


def test_a_trial_on_another_machine_is_not_checked(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals["study"], tmp_path / "study"))
    shutil.rmtree(folder / "trials" / "00001")
    checks = {check.subject: check for check in KINDS["study"].verify(folder, Budget(0))}
    assert checks["other trials"].skipped == "trials 1 have no files here"
    assert [check.problem for check in checks.values() if check.problem] == []
