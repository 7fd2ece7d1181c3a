"""Ray's token: created for its owner alone, and refused if other users may have read it."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from pathlib import Path

from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import expand_home

_BYTES = 32  # as Ray's own


def token_path() -> Path:
    """Return the file from which Ray reads the token unless RAY_AUTH_TOKEN has it."""
    return expand_home(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token")


def token() -> str | None:
    """Return the token that Ray would send, read from where Ray reads it: a variable, a file, the home folder."""
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return None
    if text := os.environ.get("RAY_AUTH_TOKEN"):
        return text.strip()
    try:
        return token_path().read_text().strip() or None
    except OSError:
        return None


def check_token() -> None:
    """Raise `UserError` if other users may read the token's file, or replace it."""
    if os.environ.get("RAY_AUTH_MODE", "token") != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = token_path()
    try:
        file, folder = path.stat(), path.parent.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot look at Ray's token {path} ({error.strerror}); make its folder yours") from error
    if file.st_mode & 0o077 or file.st_uid not in (0, os.geteuid()):
        raise UserError(
            f"others may read Ray's token: {path} has mode {stat.S_IMODE(file.st_mode):o}; chmod 600 {path} if nobody "
            "else has an account on this machine; else remove it, since it may have been read: the next run on this "
            "machine makes a new one, which every machine of a cluster needs"
        )
    if folder.st_mode & 0o022 and not folder.st_mode & stat.S_ISVTX:
        raise UserError(
            f"others may replace Ray's token: {path.parent} has mode {stat.S_IMODE(folder.st_mode):o}; "
            f"chmod 700 {path.parent}, and make a new token"
        )


def ensure_token() -> None:
    """Create the token's file for this user alone if there is none; raise as `check_token` does.

    Ray itself creates it with the permissions that the umask leaves, mostly readable by everybody.
    """
    if token() is None and os.environ.get("RAY_AUTH_MODE", "token") == "token":
        path = token_path()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create(path)
        except OSError as error:
            raise UserError(
                f"cannot write Ray's token to {path} ({error.strerror}); set RAY_AUTH_TOKEN_PATH to a file in a "
                "folder of yours"
            ) from error
    check_token()


def _create(path: Path) -> None:
    """Create the file with a new token; leave a file that another process has created in the meantime."""
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=".auth_token-")  # mode 600 from its first byte on
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(_BYTES))
            file.flush()
            os.fsync(file.fileno())
        if path.is_file() and not path.stat().st_size:  # an empty file is not a token
            path.unlink()
        os.link(part, path)
    except FileExistsError:
        pass
    finally:
        Path(part).unlink()
