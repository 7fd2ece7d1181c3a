"""Whole rounds: all schemes give the same model, also with dropouts, and the ledger counts the bytes that are sent."""

from __future__ import annotations

import hashlib
import logging

import numpy as np
import pytest

from child_processes import descendants
from narrowcast.algorithms.secure.key_store import KeyStore
from narrowcast.algorithms.secure.masking_client import Step, dropout_steps
from narrowcast.algorithms.secure.messages import EnvelopeFormat
from narrowcast.platform.errors import RunFailed
from narrowcast.platform.models.model import ITEM_FACTORS
from narrowcast.platform.rounds import chunks
from narrowcast.platform.rounds.loop import LocalBackend
from narrowcast.platform.rounds.state import Run
from narrowcast.platform.types import Arrays
from running import begin
from secure_rounds import SCHEMES, SMALL_CKKS, experiment, prepared, run_rounds, sha256

UNIFORM = "{kind: scolr, rank: 3, rank_policy: uniform"
ALGORITHMS = {
    "unequal ranks": UNIFORM + "}",
    "by component": UNIFORM + ", aggregation: per_component_mean}",
    "by examples": "{kind: colr, rank: 2, aggregation: weighted}",
    "whole rows": "{kind: fedmf}",
}


@pytest.mark.parametrize("algorithm", list(ALGORITHMS.values()), ids=list(ALGORITHMS))
def test_every_scheme_gives_the_same_model_to_the_bit(algorithm: str) -> None:
    settings = (f"algorithm={algorithm}",)
    runs = [experiment(scheme, *settings) for scheme in SCHEMES]
    played = [run_rounds(run) for run in runs]
    assert len({sha256(run, outcomes) for run, outcomes in zip(runs, played, strict=True)}) == 1
    cut = experiment(SCHEMES[1], *settings, "chunk_size=3")
    assert sha256(cut, run_rounds(cut)) == sha256(runs[0], played[0]), "integers add up to the same in every order"
    ranks = np.concatenate([outcome.ledger.rank for outcome in played[0]])
    assert len(set(ranks.tolist())) > 1 or "rank_policy" not in algorithm


def test_clients_of_all_chunks_are_told_the_hash_of_the_model_which_is_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = experiment(SCHEMES[1], "chunk_size=3")
    sent, asked = list[Arrays](), dict[int, list[bytes]]()
    answer, sha256_of = KeyStore.call, chunks.arrays_sha256

    def hashing(arrays: Arrays) -> bytes:
        sent.append(arrays)
        return sha256_of(arrays)

    def asking(self: KeyStore, method: str, round_index: int, arrays: Arrays) -> Arrays:
        if method == "secrets":
            asked.setdefault(round_index, []).append(arrays["model"].tobytes())
        return answer(self, method, round_index, arrays)

    monkeypatch.setattr(chunks, "arrays_sha256", hashing)
    monkeypatch.setattr(KeyStore, "call", asking)
    run_rounds(chosen)
    expected = []
    for arrays in sent:
        by_hand = hashlib.sha256()
        for name in sorted(arrays):
            values = np.ascontiguousarray(arrays[name])
            by_hand.update(f"{name}\0{values.dtype.str}\0{values.shape}\0".encode() + values.tobytes())
        expected.append([by_hand.digest()] * 4)  # 10 clients in chunks of 3
    assert asked == dict(zip((1, 2, 3), expected, strict=True))


def test_ranks_by_bandwidth_are_those_that_fit_under_encryption() -> None:
    policy = "{kind: scolr, rank: 3, rank_policy: {kind: bandwidth, upload_seconds: 2}}"
    chosen = experiment(SMALL_CKKS, f"algorithm={policy}", "secure.threshold=0.3", "rounds=1")
    algorithm, task = prepared(chosen)
    ledger, messages = run_rounds(chosen)[-1].ledger, algorithm.messages(task)
    budget = 2 * task.profiles.uplink_bits_per_second[ledger.client]
    weight = messages.most_bits_at_rank()
    affords = np.array([max((rank for rank in range(1, 4) if weight[rank] <= each), default=0) for each in budget])
    opener = budget.argmax()  # the client with the largest budget opens the sum, which has to fit as well
    opening = np.where(np.arange(10) == opener, messages.opened_sum_bits(), 0)
    assert weight[affords[opener]] + opening[opener] <= budget[opener]
    assert ledger.rank.tolist() == affords.tolist()
    assert ledger.uplink_bits.tolist() == np.where(affords > 0, weight[affords] + opening, 0).tolist()
    assert len(set(affords.tolist())) > 1


@pytest.mark.parametrize("lose", [(), (1,), (0, 3)])
@pytest.mark.parametrize("adversary", ["honest_but_curious", "active"])
@pytest.mark.parametrize("colluders", [0, 1])
def test_masked_sums_are_the_plain_ones_where_groups_are_thin(colluders: int, adversary: str, lose: tuple[int]) -> None:
    """Eight clients and six components: some are planned with too few senders, some are left with too few."""
    fields = f"bits: 16, smallest_group: 3, colluders: {colluders}, threshold: 0.7"
    settings = ("clients_per_round=8", "rounds=2", "algorithm={kind: scolr, rank: 6, rank_policy: uniform}")
    masked = experiment(f"{{kind: masked, adversary: {adversary}, {fields}}}", *settings)
    plain = experiment(f"{{kind: plain, {fields}}}", *settings)
    played, clear = run_rounds(masked, lose=lose), run_rounds(plain, lose=lose)
    assert sha256(masked, played) == sha256(plain, clear)
    assert [each.record.delivered for each in played] == [8 - len(lose)] * 2
    state = played[-1].state
    assert state is not None
    opened = np.any(state.server["update"] != 0, axis=0)
    assert opened.any()
    keyed = [each.ledger.uplink_bits.sum() for each in (played[0], clear[0])]
    assert keyed[0] > keyed[1]


def test_a_network_is_summed_too() -> None:
    settings = ("clients_per_round=6", "rounds=2", "model.hidden=[16]")
    runs = [experiment(scheme, *settings, name="fedavg-digits") for scheme in SCHEMES]
    assert len({sha256(run, run_rounds(run)) for run in runs}) == 1


@pytest.mark.parametrize("secure", ["{kind: plain, bits: 28, rounding: nearest}", "{kind: masked, bits: 28}"])
def test_with_many_bits_it_is_the_plain_run(secure: str) -> None:
    models = []
    for scheme in ("none", secure):
        state = run_rounds(experiment(scheme))[-1].state
        assert state is not None
        models.append(state.server[ITEM_FACTORS])
    assert np.abs(models[0] - models[1]).max() < 1e-5
    assert np.abs(models[0]).max() > 0.1


@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_three_in_ten_may_drop_out_after_masks_are_agreed(scheme: str) -> None:
    plain, chosen = experiment(SCHEMES[0]), experiment(scheme)
    gone = (0, 4, 9)
    outcomes = run_rounds(chosen, lose=gone)
    assert sha256(chosen, outcomes) == sha256(plain, run_rounds(plain, lose=gone))
    assert sha256(chosen, outcomes) != sha256(plain, run_rounds(plain))
    assert [outcome.record.delivered for outcome in outcomes] == [7, 7, 7]
    assert all((outcome.ledger.uplink_bits > 0).all() for outcome in outcomes), "who is lost has paid"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_below_the_threshold_the_round_is_refused(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    chosen = experiment(scheme, "rounds=1")
    with caplog.at_level(logging.WARNING):
        outcome = run_rounds(chosen, lose=(0, 1, 2, 3, 4))[-1]
    algorithm, task = prepared(chosen)
    assert outcome.state is not None
    assert np.array_equal(outcome.state.server[ITEM_FACTORS], begin(algorithm, task).server[ITEM_FACTORS])
    assert outcome.record.delivered == 0
    assert "5 of 10 clients arrived, and the sum of fewer than 6 is not opened" in caplog.text


@pytest.mark.parametrize("adversary", ["honest_but_curious", "active"])
def test_clients_may_stop_at_any_step_of_the_protocol(adversary: str, caplog: pytest.LogCaptureFixture) -> None:
    masked = f"{{kind: masked, bits: 16, adversary: {adversary}, dropout: 0.08, smallest_group: 1}}"
    chosen = experiment(masked, "clients_per_round=20", "rounds=4")
    played = run_rounds(chosen)
    drawn = [dropout_steps(chosen.seed, each.record.round, each.ledger.client, 0.08) for each in played]
    assert set(np.concatenate(drawn).tolist()) == {Step.ADVERTISES, Step.SHARES, Step.SIGNS, Step.REVEALS, Step.NEVER}
    needed = 12 if adversary == "honest_but_curious" else 14
    refused = [int((each > Step.REVEALS).sum()) < needed for each in drawn]
    assert [each.record.delivered == 0 for each in played] == refused
    assert caplog.text.count("the model stays") == sum(refused)
    seats = [np.flatnonzero((each <= Step.SHARES) | no) for each, no in zip(drawn, refused, strict=True)]
    assert [each.record.delivered for each in played] == [20 - len(each) for each in seats]
    lost = {each.record.round: each.ledger.client[seat] for each, seat in zip(played, seats, strict=True)}
    plain = experiment(
        "{kind: plain, bits: 16, smallest_group: 1, threshold: 0.05}", "clients_per_round=20", "rounds=4"
    )
    assert sha256(chosen, played) == sha256(plain, run_rounds(plain, lose_clients=lost))


def test_late_uploads_are_dropouts() -> None:
    runs = [
        experiment(scheme, "deadline_seconds=10.3", "secure.threshold=0.51", "fleet={kind: lognormal}")
        for scheme in SCHEMES[:2]
    ]
    played = [run_rounds(run) for run in runs]
    late = [outcome.record.late for outcome in played[1]]
    assert any(late)
    assert all(outcome.record.delivered == 10 - outcome.record.late >= 6 for outcome in played[1])
    assert sha256(runs[0], played[0]) == sha256(runs[1], played[1])


def test_a_component_of_few_clients_is_not_opened() -> None:
    settings = ("rounds=1", "algorithm.rank=6")
    all_of_it = run_rounds(experiment("{kind: masked, smallest_group: 1}", *settings))[-1].state
    nothing = run_rounds(experiment("{kind: masked, smallest_group: 6}", *settings))[-1].state
    assert all_of_it is not None
    assert nothing is not None
    opened = [np.any(state.server["update"] != 0, axis=0) for state in (all_of_it, nothing)]
    assert opened[0].all()
    assert not opened[1].all()


@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_a_resumed_run_has_new_keys_and_the_same_model(scheme: str) -> None:
    chosen = experiment(scheme, "checkpoint_every=1")
    straight = run_rounds(chosen)
    assert sha256(chosen, run_rounds(chosen, state=straight[0].state)) == sha256(chosen, straight)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_ledger_counts_the_bytes_that_are_sent(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = experiment(scheme, "rounds=1")
    sent: dict[int, int] = {}
    seal = EnvelopeFormat.seal

    def weighed(self: EnvelopeFormat, client: int, bodies: list[bytes | None], key: bytes) -> bytes:
        data = seal(self, client, bodies, key)
        sent[client] = sent.get(client, 0) + 8 * len(data)
        return data

    monkeypatch.setattr(EnvelopeFormat, "seal", weighed)
    ledger = run_rounds(chosen)[-1].ledger
    algorithm, task = prepared(chosen)
    opened = 0
    if "ckks" in scheme:
        opened = algorithm.messages(task).opened_sum_bits()
    got = dict(zip(ledger.client.tolist(), ledger.uplink_bits.tolist(), strict=True))
    assert got == {client: bits + opened * (client == min(sent)) for client, bits in sent.items()}
    plain = run_rounds(experiment("none", "rounds=1"))
    extra = ledger.downlink_bits - plain[-1].ledger.downlink_bits
    assert (extra > 0).all() if "plain" not in scheme else not extra.any()


def test_updates_that_are_tampered_with_are_left_out_and_the_round_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ("rounds=1", "clients_per_round=8")
    chosen = experiment(SMALL_CKKS, *settings)
    seal = EnvelopeFormat.seal

    def tampered(self: EnvelopeFormat, client: int, bodies: list[bytes | None], key: bytes) -> bytes:
        data = seal(self, client, bodies, key)
        return data if client % 4 else data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]

    monkeypatch.setattr(EnvelopeFormat, "seal", tampered)
    with caplog.at_level(logging.WARNING):
        outcome = run_rounds(chosen)[-1]
    bad = outcome.ledger.client % 4 == 0
    assert bad.any()
    assert outcome.ledger.delivered.tolist() == (~bad).tolist()
    assert caplog.text.count("was changed, or is not signed by it") == bad.sum()


@pytest.mark.slow
def test_without_its_key_holder_a_run_stops_and_can_be_resumed() -> None:
    chosen = experiment(SMALL_CKKS, "backend.kind=local")
    algorithm, task = prepared(chosen)
    outcomes = LocalBackend().run(Run(chosen, algorithm, task), begin(algorithm, task))
    first = next(outcomes)
    assert first.record.delivered == 10
    holder = descendants("key_store_process")
    assert len(holder) == 1
    holder[0].kill()
    with pytest.raises(RunFailed, match="holds the clients' keys is gone; resume the run"):
        next(outcomes)
