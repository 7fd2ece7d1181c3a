"""Write locks/runtime.txt and locks/development.txt: the files of every pin in constraints.txt, by their sha256.

They are for Linux on x86-64 and Python 3.11. The first has what the image needs, narrowcast[cluster,server,he] and the
build back-end; the second has the rest. pip's own report names the files: those that this machine would install, and
those of pypi.org alone, which differ where this machine has an index of its own, as one of torch's CPU builds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

_BUILD = ("hatchling", "packaging", "pathspec", "pluggy", "tomlkit", "trove-classifiers")
_PYPI_ONLY = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_INDEX_URL": "https://pypi.org/simple"}
_HEADER = "# Made by `make lock` from constraints.txt, for Linux on x86-64 and Python 3.11. {}\n"


def report(words: list[str], environment: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Return the version and the sha256 of the file that pip would install, by the name of the package."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        options = ["--dry-run", "--ignore-installed", "--quiet", "--only-binary", ":all:", "--report", str(path)]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, *words], check=True, env={**os.environ, **environment}
        )
        found = json.loads(path.read_text())["install"]
    return {
        normal(each["metadata"]["name"]): (
            each["metadata"]["version"].partition("+")[0],
            each["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", ""),
        )
        for each in found
    }


def normal(name: str) -> str:
    """Return the name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Write both files."""
    pins = ["--no-deps", "-r", "constraints.txt"]
    hashes: dict[str, set[str]] = defaultdict(set)
    versions: dict[str, str] = {}
    for environment in ({}, _PYPI_ONLY):
        for name, (version, sha256) in report(pins, environment).items():
            versions[name] = version
            hashes[name].add(sha256)
    runtime = {*report(["-c", "constraints.txt", ".[cluster,server,he]"], {}), *_BUILD} & versions.keys()
    for file, names, what in (
        ("runtime", runtime, "The image's packages."),
        ("development", versions.keys() - runtime, "The other packages of `make venv`."),
    ):
        lines = [
            " ".join([f"{name}=={versions[name]}", *(f"--hash=sha256:{each}" for each in sorted(hashes[name]))]) + "\n"
            for name in sorted(names)
        ]
        Path("locks", f"{file}.txt").write_text(_HEADER.format(what) + "".join(lines))


if __name__ == "__main__":
    main()
