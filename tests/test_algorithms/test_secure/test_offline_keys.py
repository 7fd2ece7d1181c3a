"""Offline keys: readable by their owner only, refused if damaged, kept by a resume, never in the server's process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from test_key_secrecy import memory_of, secret_key

from narrowcast.algorithms.secure.ckks import CKKS
from narrowcast.algorithms.secure.key_store import KeyStore
from narrowcast.algorithms.secure.keys import FILE, make_key_files
from narrowcast.algorithms.secure.schemes import Protection
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import use_disk
from power_cuts import RULES, crash_state
from recording_disk import RecordingDisk
from secure_rounds import SMALL_CKKS, experiment, prepared, run_rounds

# Half of the clients in each round.
HALVES = (
    *("model.hidden=[4]", "data={kind: digits, clients: 12, partition: iid}", "clients_per_round=6"),
    "checkpoint_every=1",
)

# Runs with the key folder in its arguments, then waits while the test searches its memory.
SERVER = """
import sys
from narrowcast.experiment import load_experiment
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.rounds.state import start
experiment = load_experiment("fedavg-digits", sys.argv[1:])
run = Run(experiment, experiment.secured_algorithm, experiment.task(experiment.data.load()))
outcomes = list(experiment.backend.run(run, start(run)))
assert [outcome.record.delivered for outcome in outcomes] == [10, 10]
print("played", flush=True)
sys.stdin.read()
"""


def scheme_of(secure: str) -> Protection:
    scheme = experiment(secure).secure
    assert isinstance(scheme, Protection)
    return scheme


def with_keys(secure: str, folder: Path) -> str:
    return secure.replace("}", f", keys: {folder}}}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_key_files(tmp_path / "keys", scheme_of(SMALL_CKKS))
    return tmp_path / "keys"


def test_the_file_is_for_its_owner_alone_and_is_not_replaced(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == [FILE]
    assert (folder / FILE).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    before = (folder / FILE).read_bytes()
    with pytest.raises(UserError, match=r"clients.key exists already, .* give another folder"):
        make_key_files(folder, scheme_of(SMALL_CKKS))
    assert (folder / FILE).read_bytes() == before
    (folder / "a file").touch()
    with pytest.raises(UserError, match="cannot write keys"):
        make_key_files(folder / "a file", scheme_of(SMALL_CKKS))


def test_two_key_holders_have_the_same_keys_and_runs_of_their_own(folder: Path) -> None:
    holders = [KeyStore(scheme_of(with_keys(SMALL_CKKS, folder))) for _ in range(2)]
    first, second = (each.call("public", 0, {}) for each in holders)
    assert np.array_equal(first["key"], second["key"])
    assert not np.array_equal(first["run"], second["run"])
    verify = [each.call("begin", 1, {"clients": np.arange(4)})["verify"] for each in holders]
    assert np.array_equal(*verify)
    assert not np.array_equal(verify[0], KeyStore(scheme_of(SMALL_CKKS)).call("begin", 1, {"clients": np.arange(4)}))


def test_what_is_wrong_with_a_folder_is_said(folder: Path, tmp_path: Path) -> None:
    path, kept = folder / FILE, (folder / FILE).read_bytes()

    def refused(why: str, secure: str = SMALL_CKKS, where: Path = folder) -> None:
        with pytest.raises(UserError, match=why) as error:
            KeyStore(scheme_of(with_keys(secure, where))).call("public", 0, {})
        assert len(str(error.value).splitlines()) == 1

    refused(r"there is no .*nowhere/clients.key; run `narrowcast keys make", where=tmp_path / "nowhere")
    refused(r"for kind ckks, ring 4096, prime_bits \[48, 60\], not for kind ckks, ring 8192", "{kind: ckks}")
    refused(r"for kind ckks, .*, not for kind masked", "{kind: masked}")
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        refused(rf"others may read the keys: .* has mode {mode:o}; chmod 600 it")
    path.chmod(0o600)
    folder.chmod(0o770)
    refused("others may replace the keys: .* has mode 770; chmod 700 it")
    folder.chmod(0o700)
    for cut in (*range(0, 400, 23), 4000, len(kept) - 1):
        path.write_bytes(kept[:cut])
        refused("is damaged or incomplete")
    for place in np.random.default_rng(0).integers(0, len(kept), 40).tolist():
        path.write_bytes(kept[:place] + bytes([kept[place] ^ 4]) + kept[place + 1 :])
        refused("is damaged or incomplete|is for kind|")
    path.write_bytes(kept)
    assert KeyStore(scheme_of(with_keys(SMALL_CKKS, folder))).call("public", 0, {})["key"].size


@pytest.mark.slow
def test_a_run_with_bad_keys_is_refused_before_it_begins(folder: Path) -> None:
    (folder / FILE).chmod(0o644)
    with pytest.raises(UserError, match="chmod 600 it"):
        prepared(experiment(with_keys(SMALL_CKKS, folder)))


@pytest.mark.slow
def test_a_resume_sends_its_new_public_key_and_none_where_keys_last(folder: Path) -> None:
    chosen, kept = (
        experiment(secure, *HALVES, "rounds=3", name="fedavg-digits")
        for secure in (SMALL_CKKS, with_keys(SMALL_CKKS, folder))
    )
    straight = run_rounds(chosen)
    before, (resumed,) = straight[2].ledger, run_rounds(chosen, state=straight[1].state)
    assert isinstance(chosen.secure, CKKS)
    assert np.array_equal(resumed.ledger.downlink_bits, before.downlink_bits + 8 * chosen.secure.public_key_bytes())
    assert np.array_equal(resumed.ledger.seconds, before.seconds), "that a run was interrupted takes no virtual time"
    (resumed,) = run_rounds(kept, state=straight[1].state)
    assert np.array_equal(resumed.ledger.downlink_bits, before.downlink_bits)


def test_rounds_played_again_are_charged_as_they_were() -> None:
    chosen = experiment(SMALL_CKKS, *HALVES, "rounds=5", name="fedavg-digits")
    once = run_rounds(chosen)
    twice = run_rounds(chosen, state=once[1].state)  # from round 3 on with the second keys
    state = twice[0].state
    assert state is not None
    assert state.resumed_after == 2
    thrice = run_rounds(chosen, state=replace(state, settled_round=4))
    assert thrice[0].record == twice[1].record, "round 4 stands in the journal"
    assert thrice[1].record.downlink_bits > twice[2].record.downlink_bits, "round 5 has the third keys"


@pytest.mark.slow
def test_the_server_never_holds_keys_made_offline(folder: Path, tmp_path: Path) -> None:
    secure = with_keys(SMALL_CKKS, folder)
    settings = ("model.hidden=[4]", "rounds=2", "clients_per_round=10", f"secure={secure}", "backend=local")
    command = [sys.executable, "-W", "ignore", "-c", SERVER, *settings]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == b"played\n"
        memory = memory_of(server.pid, tmp_path / "memory")
        server.stdin.close()
    key_store = KeyStore(scheme_of(secure))
    public = key_store.call("public", 0, {})["key"].tobytes()
    assert public[1000:1032] in memory, "the search finds what the server was given"
    content = (folder / FILE).read_bytes()
    assert key_store._keys.root in content
    assert content[-32:] == key_store._keys.root or content[-32:] == key_store._keys.context[-32:]
    for secret in (
        secret_key(key_store),
        key_store._keys.root,
        key_store._keys.context[-2000:-1000],
        key_store._key(3),
        content[-64:],
    ):
        assert secret not in memory
        assert secret.hex().encode() not in memory
    memory.path.unlink()  # some hundred MB


def test_a_power_cut_leaves_whole_keys_or_none(tmp_path: Path) -> None:
    made, scheme, disk = tmp_path / "made", scheme_of("{kind: masked, bits: 16}"), RecordingDisk()
    made.mkdir()
    with use_disk(disk):
        path = make_key_files(made / "new" / "keys", scheme)
    for after, rule in product(range(len(disk.operations) + 1), RULES):
        left = tmp_path / f"{after} {rule}"
        left.mkdir()
        crash_state(disk.operations, made, after, rule).write(left)
        folder = left / "new" / "keys"
        if not (folder / FILE).exists():
            assert after < len(disk.operations)
            make_key_files(folder, scheme)
        else:
            assert (folder / FILE).read_bytes() == path.read_bytes()
