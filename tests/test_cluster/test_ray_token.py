"""Ray's token is for its owner: created so under any umask, refused otherwise, and closed to another account."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import TINY, assert_refused, narrowcast
from narrowcast.cluster.ray_token import check_token, ensure_token, token
from narrowcast.platform.errors import UserError
from scratch import short_folder
from studies import write_study

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
ON_RAY = ("scolr-ml100k", "--backend", "ray", "rounds=2")


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the token of an account without one will be: in a folder that everybody can enter."""
    with short_folder() as home:
        home.chmod(0o755)
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
        yield home / ".ray" / "auth_token"


def as_nobody(*words: str | Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(words, check=False, user="nobody", group="nogroup", extra_groups=[], capture_output=True)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_it_is_created_for_its_owner_under_any_umask(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        ensure_token()
    finally:
        os.umask(before)
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert token() == path.read_text()
    assert len(path.read_text()) == 64
    assert list(path.parent.iterdir()) == [path]
    made = path.read_text()
    ensure_token()
    assert path.read_text() == made


@pytest.mark.usefixtures("path")
def test_processes_that_create_it_at_once_agree() -> None:
    seen: list[str | None] = []

    def create() -> None:
        ensure_token()
        seen.append(token())

    threads = [threading.Thread(target=create) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(seen) == 8
    assert len(set(seen)) == 1


def test_another_account_cannot_read_it(path: Path) -> None:
    """The file alone keeps them out, and its folder does too."""
    path.parent.mkdir(mode=0o755)  # as Ray makes it
    ensure_token()
    if os.geteuid() == 0:
        path.parent.parent.chmod(0o755)
        read = as_nobody("cat", path)
        assert b"Permission denied" in read.stderr
        assert token() not in read.stdout.decode()
        path.chmod(0o644)  # and a readable one would have been read
        read = as_nobody("cat", path)
        assert read.stdout.decode() == path.read_text()
    else:  # no account but root can act as another; this is what the kernel goes by
        assert (mode(path), path.stat().st_uid) == (0o600, os.geteuid())


@pytest.mark.parametrize("open_to", [0o604, 0o640, 0o644, 0o620, 0o666])
def test_a_token_that_others_may_read_is_refused_with_the_cure(path: Path, open_to: int) -> None:
    ensure_token()
    path.chmod(open_to)
    with pytest.raises(
        UserError, match=rf"others may read .* mode {open_to:o}; chmod 600 {path} .* may have been read"
    ):
        check_token()
    with pytest.raises(UserError, match="others may read"):
        ensure_token()


def test_a_folder_in_which_others_may_replace_it_is_refused(path: Path) -> None:
    ensure_token()
    path.parent.chmod(0o777)
    with pytest.raises(UserError, match=rf"others may replace .* mode 777; chmod 700 {path.parent}"):
        check_token()
    path.parent.chmod(0o1777)  # as /tmp, where only its owner may
    check_token()


def test_the_variables_of_ray_decide_where_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = path.parent.parent / "mine" / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(elsewhere))
    ensure_token()
    assert (mode(elsewhere), path.exists()) == (0o600, False)
    elsewhere.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    ensure_token()
    assert token() == "given"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ensure_token()
    assert token() is None


def test_every_command_that_uses_it_checks_it(path: Path, tmp_path: Path) -> None:
    ensure_token()
    path.chmod(0o644)
    cure = ("others may read Ray's token", f"chmod 600 {path}")
    output = ("--output", tmp_path / "runs")
    assert_refused(narrowcast("run", *ON_RAY, *output), *cure)
    assert_refused(narrowcast("run", *ON_RAY, "--address", "127.0.0.1:9", *output), *cure)
    assert_refused(narrowcast("submit", "scolr-ml100k", "--address", "http://127.0.0.1:9"), *cure)
    assert_refused(narrowcast("jobs", "list", "--address", "http://127.0.0.1:9"), *cure)
    said = narrowcast("doctor", *output)
    assert said.status == 1
    assert "Ray token" in said.err
    assert "others may read" in " ".join(said.out.split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_study_checks_it_and_a_run_without_ray_does_not(path: Path, tmp_path: Path) -> None:
    ensure_token()
    path.chmod(0o644)
    study, output = write_study(tmp_path), ("--output", tmp_path / "runs")
    assert_refused(narrowcast("tune", study, "--backend", "ray", *output), "others may read", f"chmod 600 {path}")
    assert not (tmp_path / "runs").exists()
    assert narrowcast("run", *TINY, *output).status == 0
