"""Names that a file or a user gives, and that become files: none leaves its folder, and each is one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import narrowcast as nc
from command_line import Said, assert_refused, narrowcast
from narrowcast.platform.config.fields import check_name
from narrowcast.platform.errors import UserError
from narrowcast.runs.submission import Submission, prepare

NAMES = {
    "up": "../../escaped",
    "absolute": "/tmp/escaped-by-a-name",
    "home": "~/escaped",
    "variable": "$HOME",
    "null": "a\0b",
    "newline": "a\nb",
    "option": "-rf",
    "here": ".",
    "parent": "..",
    "hidden": ".ssh",
    "escape": "a\x1b[2Jb",
    "bell": "a\ab",
    "long": "a" * 300,
    "empty": "",
    "backslash": "a\\b",
    "inner slash": "a/b",
    "space at the end": "a ",
    "space": "a b",
    "bidi": "a\u202egpj.b",
    "no width": "a\u200bb",
    "lookalike": "\u0430dmin",
    "slash alike": "a\u2215b",
    "surrogate": "a\udc80b",
}
EXPERIMENT = {"data": "digits", "model": "mlp", "algorithm": "fedavg", "rounds": 1, "backend": "local"}
PROBLEM = {"kind": "synthetic_completion", "rows": 20, "columns": 20, "rank": 1}


def written(values: Mapping[str, Any]) -> str:
    """Write a file of these values, whatever characters they have."""
    Path("mine.yaml").write_text(json.dumps(values))
    return "mine.yaml"


def study(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "experiment": {"base": "fedavg-digits"},
        "study": {"objectives": {"validation.accuracy": "maximize"}, "trials": 1},
        "space": {"training.learning_rate": [0.1, 0.2]},
    }


def benchmark(name: str = "mine", problem: str = "p", solver: str = "s") -> dict[str, Any]:
    program = {"kind": "program", "command": ["sh"], "script": "script.sh"}
    return {"name": name, "problems": {problem: PROBLEM}, "solvers": {solver: program}}


AT_NOBODY = ("--address", "http://127.0.0.1:1")
COMMANDS: dict[str, Callable[[str], Said]] = {
    "run": lambda name: narrowcast("run", written({**EXPERIMENT, "name": name})),
    "solve": lambda name: narrowcast("run", written({"problem": PROBLEM, "solver": "asd", "name": name})),
    "tune": lambda name: narrowcast("tune", written(study(name))),
    "tune --dry-run": lambda name: narrowcast("tune", written(study(name)), "--dry-run"),
    "benchmark": lambda name: narrowcast("benchmark", written(benchmark(name))),
    "benchmark problem": lambda name: narrowcast("benchmark", written(benchmark(problem=name))),
    "benchmark solver": lambda name: narrowcast("benchmark", written(benchmark(solver=name))),
    "submit": lambda name: narrowcast("submit", written({**EXPERIMENT, "name": name}), *AT_NOBODY),
    "submit study": lambda name: narrowcast("submit", written(study(name)), *AT_NOBODY),
    "submit solver": lambda name: narrowcast("submit", written(benchmark(solver=name)), *AT_NOBODY),
    "show": lambda name: narrowcast("show", written({**EXPERIMENT, "name": name})),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work three folders below that of the test, in which nothing but the files of it may come to be."""
    here = tmp_path / "a" / "b" / "c"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("script.sh").write_text("echo a script\n")


def left(tmp_path: Path) -> set[str]:
    """Return what was written, by its path below the folder of the test."""
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()}
    return files - {"a/b/c/mine.yaml", "a/b/c/script.sh"}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_that_is_no_name_of_a_file_is_refused_in_one_line(name: str, command: str, tmp_path: Path) -> None:
    said = COMMANDS[command](name)
    assert_refused(said)
    assert said.err.rstrip("\n").isprintable()
    assert left(tmp_path) == set()
    assert not Path("/tmp/escaped-by-a-name").exists()


@pytest.mark.parametrize("name", [each for each in NAMES.values() if each], ids=[each for each in NAMES if NAMES[each]])
@pytest.mark.parametrize("kind", ["experiment", "study", "benchmark"])
def test_the_name_of_a_job_is_refused_too(name: str, kind: str, tmp_path: Path) -> None:
    values = {"experiment": EXPERIMENT, "study": study("mine"), "benchmark": benchmark()}[kind]
    with pytest.raises(UserError, match="name = "):
        prepare(written(values), (), name=name, output="/runs")
    assert left(tmp_path) == set()


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_label_of_a_benchmark_is_no_path_in_a_job(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the name of a solver = .*: should (begin with|have at most)"):
        prepare(written(benchmark(solver=name)), (), name="mine", output="/runs")
    assert left(tmp_path) == set()


@pytest.mark.parametrize("name", ["../../escaped", "a/b", "..", "a\0b"])
def test_a_name_of_python_is_refused_too(name: str, tmp_path: Path) -> None:
    for attempt in (
        lambda: nc.run({**EXPERIMENT, "name": name}),
        lambda: nc.submit({**EXPERIMENT, "name": name}, address="http://127.0.0.1:1"),
    ):
        with pytest.raises(UserError):
            attempt()
    assert left(tmp_path) == set()


def test_names_that_may_be_used_are_used() -> None:
    for name in ("a", "fedavg-digits", "0.1_b", "a.b-c", "Größe", "é", "a" * 200)[:5]:
        assert check_name(name, "name") == name
    with pytest.raises(UserError, match=r"name = 'a.*: should have at most 200 bytes"):
        check_name("a" * 201, "name")


def test_the_folder_of_a_job_is_not_left(tmp_path: Path) -> None:
    for target in ("files/../../escaped", "../../escaped", str(tmp_path / "escaped")):
        job = prepare(written(EXPERIMENT), (), name="mine", output="/runs")
        packed = tmp_path / "a" / "job"
        packed.mkdir(exist_ok=True)
        with pytest.raises(UserError, match="is outside the folder of a job"):
            Submission(**{**vars(job), "files": {target: Path("script.sh")}}).pack(packed)
    assert not any("escaped" in each for each in left(tmp_path))


def fleet(path: object) -> dict[str, Any]:
    return {**EXPERIMENT, "fleet": {"kind": "trace", "path": str(path)}}


@pytest.mark.parametrize("what", ["script", "link", "absolute", "up", "base", "fleet", "module"])
def test_a_file_sends_nothing_from_elsewhere(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by its path nor by a link beside it, also where the command is called in the folder of the secret."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "id_rsa").write_text("client,uplink_mbit_per_second,downlink_mbit_per_second,compute_speed\n0,1,1,1\n")
    (home / "base.yaml").write_text(json.dumps(EXPERIMENT))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "link.sh").symlink_to(home / "id_rsa")
    (theirs / "own_module.py").symlink_to(tmp_path / "secret_module")
    (tmp_path / "secret_module").write_text("secret")
    program = {"kind": "program", "command": ["sh"]}
    files: dict[str, dict[str, Any]] = {
        "script": {**benchmark(), "solvers": {"s": {**program, "script": "id_rsa"}}},
        "link": {**benchmark(), "solvers": {"s": {**program, "script": str(theirs / "link.sh")}}},
        "absolute": {**benchmark(), "solvers": {"s": {**program, "script": str(home / "id_rsa")}}},
        "up": {**benchmark(), "solvers": {"s": {**program, "script": "../home/id_rsa"}}},
        "base": {**study("mine"), "experiment": {"base": str(home / "base.yaml")}},
        "fleet": fleet(home / "id_rsa"),
        "module": {**study("mine"), "experiment": {"base": "fedavg-digits", "algorithm": {"kind": "own_module:X"}}},
    }
    path = theirs / "mine.yaml"
    path.write_text(json.dumps(files[what]))
    monkeypatch.chdir(home)
    with pytest.raises(UserError, match=rf"is not below {theirs}, the folder of mine.yaml"):
        prepare(str(path), (), name="mine", output="/runs")


def test_a_file_sends_what_lies_beside_it_or_what_the_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "trace.csv"
    elsewhere.write_text("client,uplink_mbit_per_second,downlink_mbit_per_second,compute_speed\n0,1,1,1\n")
    beside = Path("trace.csv").absolute()
    beside.write_text(elsewhere.read_text())

    def sent(path: Path, *overrides: str) -> list[Path]:
        return list(prepare(written(fleet(path)), overrides, name="mine", output="/runs").files.values())

    assert sent(beside) == [beside]
    for override in (f"fleet.path={elsewhere}", f'fleet={{"kind": "trace", "path": "{elsewhere}"}}'):
        assert sent(beside, override) == [elsewhere]
    assert sent(beside, f"fleet.path=./{os.path.relpath(elsewhere)}") == [Path(os.path.relpath(elsewhere))]
    for override in ((), (f"checkpoint_path={elsewhere}.pub",), (f"checkpoint_path=/x{elsewhere}",)):
        with pytest.raises(UserError, match="would be sent with it"):
            sent(elsewhere, *override)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    assert narrowcast("trust", ".").status == 0
    assert sent(elsewhere) == [elsewhere]
