"""The server's process never holds the keys that open a sum, and no secret is written to disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from narrowcast.algorithms.secure.key_store import KeyStore
from narrowcast.algorithms.secure.key_store_process import serve
from narrowcast.algorithms.secure.schemes import Protection
from secure_rounds import SMALL_CKKS, experiment

# A server whose key holder is the test, at the other end of its standard pipes. With a folder it is `narrowcast run`.
SERVER = """
import os, sys
from contextlib import contextmanager
from pathlib import Path
from narrowcast.algorithms.secure.aggregation import SecureAggregation
from narrowcast.algorithms.secure.key_store_process import PipedKeyStore
from narrowcast.experiment import load_experiment
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.rounds.state import start

requests = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)

@contextmanager
def held_elsewhere(self, answered=None):
    yield PipedKeyStore(requests, sys.stdin.buffer)

SecureAggregation.key_store_process = held_elsewhere
experiment = load_experiment("scolr-ml100k", sys.argv[2:])
if sys.argv[1]:
    from narrowcast.runs import session
    from narrowcast.runs.prepared import prepare
    session.run(prepare(experiment, Path(sys.argv[1])), lambda row: None)
else:
    run = Run(experiment, experiment.secured_algorithm, experiment.task(experiment.data.load()))
    outcomes = list(experiment.backend.run(run, start(run)))
    assert [outcome.record.delivered for outcome in outcomes] == [10, 10]
requests.close()
sys.stdin.buffer.read()
"""


def play_with_keys_here(scheme: str, output: Path | None, dumps: Path) -> tuple[KeyStore, Memory]:
    """Run with the clients' keys in this process; return them and the memory of the server's process."""
    settings = [
        "algorithm={kind: scolr, rank: 3, rank_policy: uniform}",
        *("model.embedding_dim=8", "rounds=2", "clients_per_round=10", "evaluate_every=2", f"secure={scheme}"),
        *("backend=local", "tracking.system_metrics=false"),
    ]
    command = [sys.executable, "-W", "ignore", "-c", SERVER, str(output or ""), *settings]
    kept = experiment(scheme).secure
    assert isinstance(kept, Protection)
    key_store = KeyStore(kept)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        serve(key_store, server.stdout, server.stdin)
        memory = memory_of(server.pid, dumps / "server")
        server.stdin.close()
    assert server.returncode == 0
    return key_store, memory


_BLOCK = bytes(2**20)


@dataclass(frozen=True)
class Memory:
    """What was in the writable memory of a process, kept in a file: beside it this process would grow by as much."""

    path: Path

    def __contains__(self, wanted: bytes) -> bool:
        end = b""
        with self.path.open("rb") as file:
            while block := file.read(len(_BLOCK)):
                if wanted in end + block:
                    return True
                end = block[-len(wanted) :]
        return False


@pytest.fixture
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for the memory of processes, some hundred MB each, which are not kept."""
    folder = tmp_path_factory.mktemp("memory")
    yield folder
    shutil.rmtree(folder)


def memory_of(pid: int, path: Path) -> Memory:
    """Return the writable memory of a process without blocks of zeros: most of what threads reserve was never used."""
    maps = Path(f"/proc/{pid}/maps").read_text()  # at once: of this process it grows with what is read
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory, path.open("wb") as kept:
        for line in maps.splitlines():
            span, access = line.split()[:2]
            start, stop = (int(each, 16) for each in span.split("-"))
            if access.startswith("rw") and "[v" not in line:
                memory.seek(start)
                blocks = (memory.read(min(len(_BLOCK), stop - place)) for place in range(start, stop, len(_BLOCK)))
                kept.writelines(block for block in blocks if block != _BLOCK[: len(block)])
    return Memory(path)


def secret_key(key_store: KeyStore) -> bytes:
    """Return the first residues of the decryption key."""
    plain = key_store._secret.secret_key().data.data()
    return b"".join(int(plain.data(place)).to_bytes(8, "little") for place in range(4))


def files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_the_server_cannot_decrypt(dumps: Path) -> None:
    key_store, memory = play_with_keys_here(SMALL_CKKS, None, dumps)
    here = memory_of(os.getpid(), dumps / "here")
    public, opens = key_store.call("public", 1, {})["key"].tobytes(), secret_key(key_store)
    assert public[1000:1032] in memory, "the search finds what the server was given"
    assert opens in here, "and the key where it is, before it was looked at"
    for secret in (opens, key_store._keys.root):
        assert len(set(secret)) > 16
        assert secret not in memory


@pytest.mark.slow
def test_nothing_secret_is_written_down(tmp_path: Path, dumps: Path) -> None:
    key_store, memory = play_with_keys_here("{kind: masked, bits: 16}", tmp_path, dumps)
    written = files(tmp_path)
    assert b"secure.kind" in written, "the search looks into the tracking store"
    assert b"participants" in written, "and into the checkpoint"
    held = [key_store._keys.root, *(key_store._key(client) for client in range(943))]
    for client in key_store._round.values():
        own, pairs = client.mask_seeds()
        held += [client._mask_key.private_bytes_raw(), client._seal_key.private_bytes_raw(), own, *pairs.values()]
        assert own.hex() not in repr(client)
    for secret in held:
        assert secret not in written
        assert secret.hex().encode() not in written
    assert key_store._keys.root not in memory
