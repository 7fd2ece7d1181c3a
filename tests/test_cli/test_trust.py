"""Looking at a file or a run never runs code that it names; running does, and so does looking in a trusted folder."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from command_line import Said, assert_refused, narrowcast
from narrowcast.platform.config.trust import is_looking, is_trusted, looking, trust_folder, trusted_folders
from narrowcast.platform.config.yaml import read_yaml, write_yaml
from narrowcast.runs.verification import verify

# MLflow's SQL store uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")

BASE = """
rounds: 1
clients_per_round: 4
data: {kind: digits, clients: 20}
model: softmax
algorithm: fedavg
backend: local
tracking: {system_metrics: false}
"""
SOLVE = "problem: {kind: synthetic_completion, rows: 20, columns: 10, rank: 1, fraction: 0.8}\niterations: 1\n"
PROGRAM = "solver: {kind: program, command: [/bin/sh, -c, 'touch MARK']}\n"
SHELL = "{kind: torch, factory: 'subprocess:getoutput', arguments: {cmd: 'touch MARK'}}"


@dataclass(frozen=True)
class Planted:
    """A folder with code in every place that a file may name; what runs leaves `mark` behind."""

    folder: Path
    mark: Path

    def file(self, name: str, text: str) -> Path:
        (path := self.folder / name).write_text(text.replace("MARK", str(self.mark)))
        return path

    def ran(self) -> bool:
        """Return whether code ran since the last call."""
        ran = self.mark.exists()
        self.mark.unlink(missing_ok=True)
        return ran


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planted]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder := tmp_path / "of a stranger").mkdir()
    planted = Planted(folder, tmp_path / "mark")
    module = "from pathlib import Path\nPath('MARK').touch()\ndef make(**_): Path('MARK').touch()\nclass Thing: pass\n"
    planted.file("planted_module.py", module)
    planted.file("sitecustomize.py", module)
    planted.file("planted.pth", "import pathlib; pathlib.Path('MARK').touch()\n")
    yield planted
    sys.modules.pop("planted_module", None)


def experiments(planted: Planted) -> dict[str, Path]:
    """Write a file for each place of an experiment or a solve that may name code."""
    sections = {
        "algorithm": "planted_module:Thing",
        "model": "{kind: 'planted_module:Thing'}",
        "data": "{kind: torch, factory: 'planted_module:make'}",
        "fleet": "planted_module:Thing",
        "training": "{kind: 'planted_module:Thing'}",
    }
    files = {name: planted.file(f"{name}.yaml", _with(BASE, name, value)) for name, value in sections.items()}
    files["shell in model"] = planted.file("shell-model.yaml", _with(BASE, "model", SHELL))
    files["shell in data"] = planted.file("shell-data.yaml", _with(BASE, "data", SHELL))
    files["program"] = planted.file("program.yaml", SOLVE + PROGRAM)
    files["solver"] = planted.file("solver.yaml", SOLVE + "solver: planted_module:Thing\n")
    files["problem"] = planted.file("problem.yaml", "problem: planted_module:Thing\nsolver: asd\niterations: 1\n")
    return files


def _with(text: str, section: str, value: str) -> str:
    lines = [line for line in text.splitlines() if not line.startswith(f"{section}:")]
    return "\n".join([*lines, f"{section}: {value}", ""])


def test_looking_at_a_file_runs_nothing(planted: Planted, tmp_path: Path) -> None:
    looks: dict[str, Sequence[object]] = {
        "show": ("show",),
        "data show": ("data", "show", "--output", tmp_path / "figures"),
        "doctor": ("doctor", "--output", tmp_path / "runs"),
        "keys": ("keys", "make", tmp_path / "keys"),
        "dry run": ("run", "--dry-run", "--output", tmp_path / "runs"),
    }
    executions = []
    for place, file in experiments(planted).items():
        for look, words in looks.items():
            narrowcast(*words, file)
            executions += [(look, place)] * planted.ran()
    assert executions == []


def test_looking_at_studies_and_benchmarks_runs_nothing(planted: Planted) -> None:
    space = "space: {training.learning_rate: [0.1, 0.2]}\n"
    settings = "study: {objectives: {validation.accuracy: maximize}, trials: 1, backend: local, holdout: {trials: 0}}\n"
    studies = [
        planted.file("base.yaml", f"experiment: {{base: '{planted.folder / 'algorithm.yaml'}'}}\n{settings}{space}"),
        planted.file("inline.yaml", f"experiment: {{base: fedavg-digits, model: {SHELL}}}\n{settings}{space}"),
        planted.file(
            "choice.yaml",
            f"experiment: fedavg-digits\n{settings}space: {{algorithm: [fedavg, 'planted_module:Thing']}}\n",
        ),
        planted.file(
            "solve.yaml",
            "solve:\n  iterations: 1\n  problem: synthetic_completion\n"
            "  solver: {kind: program, command: [/bin/sh, -c, 'touch MARK']}\n"
            "study: {objectives: {relative_residual: minimize}, trials: 1, backend: local, holdout: {trials: 0}}\n"
            "space: {solver.inner_iterations: [1, 2]}\n",
        ),
    ]
    experiments(planted)
    for study in studies:
        narrowcast("tune", study, "--dry-run")
        assert not planted.ran(), study
    benchmark = planted.file(
        "bench.yaml", "problems: {a: synthetic_completion}\nsolvers: {x: 'planted_module:Thing'}\n"
    )
    assert "planted_module:Thing" in narrowcast("show", benchmark).out
    assert not planted.ran()


@pytest.fixture
def run_of_a_stranger(planted: Planted) -> Path:
    """A finished run with a module beside it and one kept with it, whose configuration can be made to name code."""
    file = planted.file("mine.yaml", BASE)
    said = narrowcast("run", file, "--output", planted.folder / "runs")
    assert said.status == 0, said.err
    folder = planted.folder / "runs" / "mine"
    (folder / "plugins").mkdir()
    shutil.copy(planted.folder / "planted_module.py", folder / "plugins" / "planted_module.py")
    return folder


@pytest.mark.parametrize("place", ["algorithm: planted_module:Thing", f"model: {SHELL}", f"data: {SHELL}"])
def test_looking_at_a_run_runs_nothing(
    place: str, planted: Planted, run_of_a_stranger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    section, _, value = place.partition(": ")
    config = run_of_a_stranger / "config.yaml"
    values = read_yaml(config.read_text(), "config.yaml")
    values[section] = read_yaml(value.replace("MARK", str(planted.mark)), "value")
    write_yaml(values, config)
    looks: list[Sequence[object]] = [
        ("verify", run_of_a_stranger),
        ("verify", run_of_a_stranger, "--rounds", "0"),
        ("compare", run_of_a_stranger),
        ("report", run_of_a_stranger),
        ("site", run_of_a_stranger),
        ("sync", run_of_a_stranger),
        ("export", run_of_a_stranger, "--output", tmp_path / "m.safetensors"),
        ("export", run_of_a_stranger, "--client", "0", "--output", tmp_path / "c.safetensors"),
        ("show", config),
        ("data", "show", config),
        ("list",),
        ("schema",),
    ]
    for words in looks:
        narrowcast(*words)
        assert not planted.ran(), words
    (run_of_a_stranger / "model.safetensors").unlink()  # the model is then to be had from the checkpoint alone
    narrowcast("export", run_of_a_stranger, "--output", tmp_path / "n.safetensors")
    assert not planted.ran()
    assert not (tmp_path / "c.safetensors").exists()


def test_verify_checks_the_files_and_says_what_it_left_out(planted: Planted, run_of_a_stranger: Path) -> None:
    config = run_of_a_stranger / "config.yaml"
    config.write_text(config.read_text().replace("kind: fedavg\n", "kind: planted_module:Thing\n", 1))
    first = next(iter(verify(run_of_a_stranger)))
    assert (first.subject, is_looking()) == ("journal", False)
    said = _in_one_line(narrowcast("verify", run_of_a_stranger))
    assert not planted.ran()
    assert "journal the checksum of each line ok" in said
    assert "not checked: planted_module:Thing is code of the run's own, which looking does not run" in said
    lines = (run_of_a_stranger / "journal.jsonl").read_text()
    (run_of_a_stranger / "journal.jsonl").write_text(lines.replace("1", "2", 1))
    assert narrowcast("verify", run_of_a_stranger).status == 1
    assert not planted.ran()


def _in_one_line(said: Said) -> str:
    return " ".join(said.out.split())


@pytest.mark.parametrize("place", ["algorithm", "model", "data", "fleet", "training", "solver", "problem"])
def test_with_trust_a_module_is_imported(place: str, planted: Planted) -> None:
    narrowcast("show", experiments(planted)[place], "--trust")
    assert planted.ran()


def test_running_runs_and_so_does_looking_with_trust(planted: Planted, tmp_path: Path) -> None:
    program = experiments(planted)["program"]
    narrowcast("run", program, "--output", tmp_path / "runs")
    assert planted.ran()
    file = experiments(planted)["shell in data"]
    assert_refused(narrowcast("show", file), "subprocess:getoutput is code of the file's own", "narrowcast trust")
    narrowcast("data", "show", file, "--trust", "--output", tmp_path / "figures")
    assert planted.ran()
    narrowcast("run", file, "--output", tmp_path / "runs")
    assert planted.ran()


def test_a_trusted_folder_covers_what_lies_below_it(planted: Planted, tmp_path: Path) -> None:
    file = experiments(planted)["shell in data"]
    said = narrowcast("trust", planted.folder)
    assert (said.status, said.out) == (0, f"{planted.folder} is trusted\n")
    assert narrowcast("trust").out == f"{planted.folder}\n"
    (planted.folder / "deeper").mkdir()
    shutil.copy(file, planted.folder / "deeper" / "copy.yaml")
    narrowcast("data", "show", planted.folder / "deeper" / "copy.yaml", "--output", tmp_path / "figures")
    assert planted.ran()
    (planted.folder / "link").symlink_to(tmp_path, target_is_directory=True)
    assert not is_trusted(planted.folder / "link")  # what lies elsewhere is not trusted by a link
    assert narrowcast("trust", "--remove", planted.folder).status == 0
    narrowcast("data", "show", file, "--output", tmp_path / "figures")
    assert not planted.ran()


def test_a_name_with_a_line_break_of_unicode_or_without_utf_8_is_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    names = ("above\u2028below", "above\x1dbelow", os.fsdecode(b"above\xff"))
    for name in names:
        (tmp_path / name).mkdir()
        trust_folder(tmp_path / name)
    assert trusted_folders() == [(tmp_path / name).resolve() for name in names]
    assert is_trusted(tmp_path / names[0] / "inside")
    assert not is_trusted(tmp_path / "above")


def test_lines_that_name_no_folder_trust_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    settings = tmp_path / "narrowcast" / "trusted_folders"
    settings.parent.mkdir()
    settings.write_bytes(b"/\n.\n\n//\nrelative\n\xff\xfe\n/\x00\n")
    assert not is_trusted(tmp_path)


def test_what_cannot_be_trusted_is_one_line(planted: Planted, tmp_path: Path) -> None:
    assert_refused(narrowcast("trust", tmp_path / "nowhere"), "nowhere is not a folder")
    assert_refused(narrowcast("trust", "/"), "/ cannot be trusted as a whole")
    assert_refused(narrowcast("trust", "--remove", planted.folder), "is not trusted; trusted: none")
    assert_refused(narrowcast("trust", "--remove"), "name the folder that you trust no longer")
    assert trusted_folders() == []


def test_looking_ends_with_its_block(planted: Planted) -> None:
    assert not is_looking()
    with looking(planted.folder):
        assert is_looking()
        with looking(planted.folder, trust=True):
            assert not is_looking()
        assert is_looking()
    assert not is_looking()
    trust_folder(planted.folder)
    with looking(planted.folder / "runs" / "one"):
        assert not is_looking()
