"""Install into a virtual environment, with a line for what takes long: pip prints hundreds, or with --quiet none.

    install.py FOLDER dev        this checkout, its papers, and all that its tests and pages need: `make venv`
    install.py FOLDER sbom       the program of `make sbom`
    install.py FOLDER FILE.whl   a wheel and what it requires: `make wheel`

Versions are those of constraints.txt; on the platform of locks/*.txt the sha256 of every file is checked as well.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

LOCKED = ("linux-x86_64", (3, 11))
LARGE_MB = 20
QUIET_SECONDS = 15.0
_PACKAGE = re.compile(r"(?:Collecting |Processing \S*/)(\w+(?:[.-][A-Za-z_]\w*)*)")
_FILE = re.compile(r"  (?:Downloading|Using cached) (?:\S*/)?([\w.+]+-[\w.+]+)\S* \(([\d.]+) (MB|GB)\)")


def pip(python: Path, *words: str, errors: int | None = None) -> bool:
    """Return whether pip installed these. Large files have a line each, the others one every 15 seconds."""
    command = [str(python), "-m", "pip", "install", "--progress-bar", "off", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        assert process.stdout is not None
        packages, spoken = 0, time.monotonic()
        for line in process.stdout:
            said = ""
            if package := _PACKAGE.match(line):
                packages += 1
                said = f"{packages} packages, now {package[1]}" if time.monotonic() - spoken > QUIET_SECONDS else ""
            elif (file := _FILE.match(line)) and float(file[2]) * (1000 if file[3] == "GB" else 1) >= LARGE_MB:
                said = f"{file[1]}, {file[2]} {file[3]}"
            elif line.startswith("Installing collected packages"):
                said = f"unpacking {line.count(',') + 1} packages"
            if said:
                print(f"  {said}", flush=True)
                spoken = time.monotonic()
    return process.returncode == 0


def install(python: Path, what: str, locked: bool) -> bool:
    """Return whether `what` is installed."""
    pins, hashes = ("-c", "constraints.txt"), ("--require-hashes", "--no-deps", "-r")
    if what == "sbom":
        return pip(python, *hashes, "locks/sbom.txt") if locked else pip(python, *pins, "cyclonedx-bom")
    if what != "dev":
        return pip(python, *pins, what)
    if not locked:
        return pip(python, *pins, "-e", ".[dev]") and pip(python, "--no-deps", "-e", "papers")
    return (
        pip(python, *hashes, "locks/runtime.txt", "-r", "locks/development.txt")
        and (
            pip(python, *hashes, "locks/torch-cpu.txt", errors=subprocess.DEVNULL)  # not on every index
            or pip(python, *hashes, "locks/torch-cuda.txt")
        )
        and pip(python, "--no-build-isolation", *pins, "-e", ".[dev]")
        and pip(python, "--no-build-isolation", "--no-deps", "-e", "papers")
    )


def main() -> None:
    """Make the environment, or end with pip's message."""
    folder, what = Path(sys.argv[1]), sys.argv[2]
    begin = time.monotonic()
    print(f"Installing {what} into {folder}; a first time takes minutes on a slow network", flush=True)
    # Links, as `python -m venv` makes them: copies onto the links of an environment that is there already would fail.
    venv.create(folder, with_pip=True, symlinks=os.name != "nt")
    place = (sysconfig.get_platform(), sys.version_info[:2])
    if not install(folder / "bin" / "python", what, place == LOCKED):
        raise SystemExit(f"{folder}: pip failed, see above")
    megabytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()) / 1e6
    print(f"Installed {what} into {folder}: {megabytes:,.0f} MB, {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
