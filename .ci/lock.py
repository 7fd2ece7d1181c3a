"""Write locks/*.txt: the files of every pin in constraints.txt, by their sha256, as pip's own report names them.

They are for Linux on x86-64 and Python 3.11. runtime.txt has what the image needs, narrowcast[cluster,server,he,ui] and
the build back-end, but torch; torch-cpu.txt and torch-cuda.txt are its two builds, the first as this machine finds it
and the second from pypi.org; sbom.txt has all of the program of `make sbom`, whose environment is its own, and
development.txt the rest.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
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
            each["metadata"]["version"],
            each["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", ""),
        )
        for each in found
    }


def normal(name: str) -> str:
    """Return the name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Write the files."""
    pins = ["--no-deps", "-r", "constraints.txt"]
    here, pypi = report(pins, {}), report(pins, _PYPI_ONLY)
    if different := [name for name in here if here[name] != pypi[name] and name != "torch"]:
        raise SystemExit(f"these files are not those of pypi.org: {', '.join(different)}")
    runtime = {*report(["-c", "constraints.txt", ".[cluster,server,he,ui]"], {}), *_BUILD} & here.keys() - {"torch"}
    sbom = report(["-c", "constraints.txt", "cyclonedx-bom"], {}).keys()
    rest = here.keys() - runtime - {"torch"} - (sbom - report(["-c", "constraints.txt", ".[dev]"], {}).keys())
    for file, names, found, what in (
        ("runtime", runtime, here, "The image's packages but torch."),
        ("development", rest, here, "The other packages of `make venv`."),
        ("sbom", sbom, here, "The packages of `make sbom`."),
        ("torch-cpu", {"torch"}, here, "PyTorch's build for CPUs."),
        ("torch-cuda", {"torch"}, pypi, "The build of pypi.org, with CUDA."),
    ):
        pinned = [f"{name}=={found[name][0]} --hash=sha256:{found[name][1]}\n" for name in sorted(names)]
        Path("locks", f"{file}.txt").write_text(_HEADER.format(what) + "".join(pinned))


if __name__ == "__main__":
    main()
