"""Keys that clients make offline and keep: one file that only its owner may read."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save

from narrowcast.algorithms.secure.protection import Encryption, Protection
from narrowcast.algorithms.secure.shamir import SECRET_BYTES
from narrowcast.platform.atomic_files import read_tensors, write_atomically
from narrowcast.platform.disk import make_folders
from narrowcast.platform.errors import UserError

FILE = "clients.key"
_FORMAT = "narrowcast-keys-1"
_MOST_SHOWN = 200  # characters of a file's parameters


@dataclass(frozen=True)
class ClientKeys:
    """The clients' private keys: the root of their signing keys, and for encryption the secret key."""

    root: bytes
    context: bytes

    @classmethod
    def new(cls, scheme: Protection) -> ClientKeys:
        """Make keys for runs under this scheme; raise `UserError` for parameters that a library refuses."""
        context = scheme.new_secret() if isinstance(scheme, Encryption) else b""
        return cls(os.urandom(SECRET_BYTES), context)

    def __repr__(self) -> str:
        return "ClientKeys(...)"


def parameters(scheme: Protection) -> str:
    """Return the parameters that keys depend on, as one line."""
    parts = {"kind": scheme.kind}
    if isinstance(scheme, Encryption):
        parts |= scheme.key_parameters()
    return ", ".join(f"{name} {value}" for name, value in parts.items())


def make_key_files(folder: Path, scheme: Protection) -> Path:
    """Write new keys into a folder, for its owner alone; raise `UserError` if it has keys or cannot be written."""
    path = folder / FILE
    if path.exists():
        raise UserError(f"{path} exists already, and runs may have been started with it; give another folder")
    keys = ClientKeys.new(scheme)
    tensors = {name: np.frombuffer(value, dtype=np.uint8) for name, value in vars(keys).items()}
    metadata = {"format": _FORMAT, "parameters": parameters(scheme), "sha256": _sha256(keys)}
    try:
        make_folders(folder, 0o700)
        write_atomically(path, save(tensors, metadata), mode=0o600)
    except OSError as error:
        raise UserError(f"cannot write keys to {folder} ({error.strerror}); give another folder") from error
    return path


def read_key_files(folder: Path, scheme: Protection) -> ClientKeys:
    """Read the keys in a folder, for the key holder alone.

    Raise `UserError` if others may read or replace them, or if they are damaged or for other parameters.
    """
    path = folder / FILE
    advice = "run `narrowcast keys make FOLDER EXPERIMENT` and set secure.keys to that folder"
    try:
        _check_modes(path)
        tensors, header = read_tensors(path)
        keys = ClientKeys(tensors["root"].tobytes(), tensors["context"].tobytes())
        made_for = " ".join(header["parameters"].split())[:_MOST_SHOWN]
        whole = header["format"] == _FORMAT and header["sha256"] == _sha256(keys) and len(keys.root) == SECRET_BYTES
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"secure.keys: there is no {path}; {advice}") from None
    except OSError as error:
        raise UserError(f"secure.keys: cannot read {path} ({error.strerror}); {advice}") from error
    except (SafetensorError, KeyError, TypeError, ValueError):  # the last two: tensors of types that numpy lacks
        whole = False
    if not whole:
        raise UserError(f"secure.keys: {path} is damaged or incomplete; {advice}")
    if made_for != parameters(scheme):
        raise UserError(f"secure.keys: {path} is for {made_for}, not for {parameters(scheme)}; {advice}")
    return keys


def _check_modes(path: Path) -> None:
    for each, forbidden, what in ((path, 0o077, "read"), (path.parent, 0o022, "replace")):
        if (mode := each.stat().st_mode) & forbidden:
            right = "600" if each is path else "700"
            raise UserError(f"others may {what} the keys: {each} has mode {mode & 0o777:o}; chmod {right} it")


def _sha256(keys: ClientKeys) -> str:
    return hashlib.sha256(keys.root + keys.context).hexdigest()
