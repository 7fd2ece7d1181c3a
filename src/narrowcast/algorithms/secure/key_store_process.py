"""The key store in a process of its own, called over two pipes.

It is started as `python -m narrowcast.algorithms.secure.key_store_process` and shares no memory with the process that
starts it: keys are made here, and only the answers of `KeyStore` leave it.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.numpy import load, save

from narrowcast.algorithms.secure.key_store import KeyStore
from narrowcast.algorithms.secure.schemes import AnyScheme, Protection
from narrowcast.platform.config.kinds import FOLDERS
from narrowcast.platform.config.plugins import loaded
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.types import Arrays, PayloadError

_HEAD = struct.Struct("<QQ")  # bytes of the text, of the arrays
_PART_BYTES = 2**20
_SECONDS_TO_END = 10.0
_SCHEME = TypeAdapter[AnyScheme](AnyScheme)


class PipedKeyStore:
    """A key store at the other end of two pipes."""

    def __init__(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._requests, self._answers = requests, answers

    def call(self, method: str, round_index: int, arrays: Arrays) -> Arrays:
        """Return the key store's answer; raise the error that it raised, `RunFailed` if its process is gone."""
        try:
            write(self._requests, json.dumps([method, round_index]), arrays)
            (kind, message), answer = read(self._answers)
        except (EOFError, OSError) as error:
            raise RunFailed("the process that holds the clients' keys is gone; resume the run") from error
        if kind == "user":
            raise UserError(message)
        if kind == "payload":
            raise PayloadError(message)
        return answer


@contextmanager
def key_store_process(scheme: Protection, answered: Path | None = None) -> Iterator[PipedKeyStore]:
    """Start the process, and end it on exit; see `KeyStore` for `answered`."""
    settings = _SCHEME.dump_json(scheme).decode()
    folders = [str(source.parent) for source in loaded()]
    module = "narrowcast.algorithms.secure.key_store_process"
    command = [sys.executable, "-m", module, settings, str(answered or ""), *folders]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the server to handle
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield PipedKeyStore(process.stdin, process.stdout)
        finally:
            with suppress(OSError):  # a request that was not read to its end is still to be flushed
                process.stdin.close()
            try:
                process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()


def serve(key_store: KeyStore, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until the other end closes its pipe."""
    while True:
        try:
            (method, round_index), arrays = read(requests)
        except EOFError:
            return
        try:
            answer, status = key_store.call(method, round_index, arrays), ["ok", ""]
        except UserError as error:
            answer, status = {}, ["user", str(error)]
        except PayloadError as error:
            answer, status = {}, ["payload", str(error)]
        write(answers, json.dumps(status), answer)


def write(stream: IO[bytes], text: str, arrays: Arrays) -> None:
    """Write one message; without pickle, so that reading it runs no code."""
    encoded, data = text.encode(), save({name: np.ascontiguousarray(values) for name, values in arrays.items()})
    stream.write(_HEAD.pack(len(encoded), len(data)) + encoded + data)
    stream.flush()


def read(stream: IO[bytes]) -> tuple[tuple[str, Any], Arrays]:
    """Read one message, a pair of which the first is a word, and arrays; raise `EOFError` if it is cut or damaged."""
    text_bytes, array_bytes = _HEAD.unpack(_exactly(stream, _HEAD.size))
    try:
        word, value = json.loads(_exactly(stream, text_bytes))
        return (str(word), value), load(_exactly(stream, array_bytes))
    except (SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise EOFError("a message between server and key store is damaged") from error


def _exactly(stream: IO[bytes], size: int) -> bytes:
    """Return so many bytes; memory grows with what arrives, whatever size is stated."""
    parts = bytearray()
    while len(parts) < size:
        part = stream.read(min(size - len(parts), _PART_BYTES))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _main() -> None:
    answered, folders = sys.argv[2], [Path(folder) for folder in sys.argv[3:]]
    scheme = _SCHEME.validate_json(sys.argv[1], context={FOLDERS: folders})
    assert isinstance(scheme, Protection), "schemes without protection have no keys"
    # A server that was killed reads no answer, which is nothing to report.
    with suppress(BrokenPipeError), os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not come between the answers
        serve(KeyStore(scheme, Path(answered) if answered else None), sys.stdin.buffer, answers)


if __name__ == "__main__":
    _main()
