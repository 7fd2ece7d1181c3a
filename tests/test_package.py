"""The wheel and the sdist: built, installed beside the required packages alone, and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from email import message_from_string
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
BUILD = "from hatchling import build; import sys; print(getattr(build, sys.argv[1])(sys.argv[2]))"
BARE = "data: digits\nmodel: mlp\nalgorithm: fedavg\nrounds: 2\ntracking: {system_metrics: false}\n"


def build(kind: str, tree: Path, target: Path, **environment: str) -> Path:
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(target)]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


def required(lines: list[str]) -> set[str]:
    """Return the names of the packages that these requirements bring, without extras of the package itself."""
    found: set[tuple[str, frozenset[str]]] = set()
    queue = wanted(lines, ())
    while queue:
        each = queue.pop()
        if (key := (canonicalize_name(each.name), frozenset(each.extras))) not in found:
            found.add(key)
            queue += wanted(distribution(each.name).requires or [], each.extras)
    return {name for name, _ in found}


def wanted(lines: Iterable[str], extras: Iterable[str]) -> list[Requirement]:
    """Return the requirements that hold on this machine with these extras."""
    all_of_them = [Requirement(line) for line in lines]
    return [
        each
        for each in all_of_them
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


def environment_of(names: set[str], folder: Path) -> Path:
    """Make a virtual environment with links to the files of installed packages, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/*/site-packages")
    for name in names:
        for file in distribution(name).files or ():
            if ".." not in file.parts:  # with the compiled files, which take minutes to make
                place = packages / file
                place.parent.mkdir(parents=True, exist_ok=True)
                if (source := Path(str(file.locate()))).exists():
                    place.symlink_to(source)
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_of_the_sdist_runs_beside_its_requirements_alone(tmp_path: Path) -> None:
    repository = "https://host.example/owner/narrowcast/blob/main"
    sdist = build("sdist", ROOT, tmp_path, NARROWCAST_REPOSITORY=repository)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    wheel = build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path)  # with the metadata of the sdist
    assert wheel.stat().st_size < 2_000_000

    unpacked = tmp_path / "unpacked"
    shutil.unpack_archive(wheel, unpacked, "zip")
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    stated = message_from_string(metadata.read_text())
    links = re.findall(r"\]\(([^)]+)\)", stated.get_payload())
    assert len(links) > 10
    assert all(link.startswith((repository, "https://arxiv.org/")) for link in links), links
    needed = required([line for line in stated.get_all("Requires-Dist") or [] if "extra ==" not in line])
    assert not needed & {"ray", "optuna", "plotly", "mlflow", "boto3", "tenseal", "phe", "pytest"}

    python = environment_of(needed, tmp_path / "empty")
    (packages,) = (tmp_path / "empty").glob("lib/*/site-packages")
    shutil.copytree(unpacked, packages, dirs_exist_ok=True)
    (tmp_path / "bare.yaml").write_text(BARE)
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTEST_XDIST_WORKER")}

    def said(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-m", "narrowcast", *words, "--output", "runs"]
        return subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)

    ran = said("run", "bare.yaml")
    assert ran.returncode == 0, ran.stderr
    assert "no backend set: training in this process" in ran.stdout
    assert (tmp_path / "runs" / "bare" / "result.json").is_file()
    for words, extra in ((("run", "bare.yaml", "backend=ray"), "ray"), (("ui",), "ui"), (("tune", "x"), "tune")):
        refused = said(*words)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert f"pip install 'narrowcast[{extra}]'" in refused.stderr
