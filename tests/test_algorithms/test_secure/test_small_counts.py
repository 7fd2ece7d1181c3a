"""Rows of items that few clients touched: left out by the key holder, or warned of where nothing can leave them out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from narrowcast.algorithms.client.sums import MaskGroup, SumBlock
from narrowcast.algorithms.secure.ckks import CKKS
from narrowcast.algorithms.secure.key_store import KeyStore
from narrowcast.algorithms.secure.participation import SmallCounts
from narrowcast.algorithms.secure.schemes import PublicKey
from narrowcast.platform.errors import UserError
from narrowcast.platform.types import Arrays, PayloadError
from secure_rounds import SCHEMES, SMALL_CKKS, experiment, prepared, run_rounds, sha256

COUNTS = np.array([0, 1, 2, 3, 9])
VALUES = np.arange(10).reshape(5, 2) + 100


def group(columns: int, counts: int) -> MaskGroup:
    return MaskGroup(
        (SumBlock("sum", None, 5 * columns),) * (columns > 0), (SumBlock("weight", None, 5 * counts),) * (counts > 0)
    )


def test_rows_below_the_minimum_are_zeros_with_their_counts() -> None:
    kept, kept_counts = np.where((COUNTS < 3)[:, None], 0, VALUES), np.where(COUNTS < 3, 0, COUNTS)
    both = SmallCounts(5, 3).blanked(group(2, 1), np.concatenate([VALUES.ravel(), COUNTS]))
    assert both.tolist() == [*kept.ravel(), *kept_counts]
    apart = SmallCounts(5, 3)
    assert apart.blanked(group(0, 1), COUNTS).tolist() == kept_counts.tolist()
    for column in (0, 1):
        assert apart.blanked(group(1, 0), VALUES[:, column]).tolist() == kept[:, column].tolist()
    by_component = np.stack([COUNTS, COUNTS[::-1]], axis=1)
    each = SmallCounts(5, 3).blanked(group(2, 2), np.concatenate([VALUES.ravel(), by_component.ravel()]))
    assert each[:10].reshape(5, 2).tolist() == np.where(by_component < 3, 0, VALUES).tolist()
    assert SmallCounts(0, 1).blanked(group(2, 0), VALUES.ravel()).tolist() == VALUES.ravel().tolist()


def test_values_are_not_opened_before_their_counts_nor_without_counts_by_item() -> None:
    with pytest.raises(PayloadError, match="have to be opened before"):
        SmallCounts(5, 3).blanked(group(1, 0), VALUES[:, 0])
    for rows, integers in ((0, COUNTS), (7, COUNTS)):
        with pytest.raises(PayloadError, match="no counts by item"):
            SmallCounts(rows, 3).blanked(group(0, 1), integers)


def test_counts_of_a_sum_that_was_refused_judge_no_rows() -> None:
    scheme = CKKS(ring=4096, prime_bits=(48, 60), bits=16, smallest_count=3)
    store, numbers = KeyStore(scheme), scheme.fixed_point(9, 9)
    public = PublicKey.of(store.call("public", 0, {}))
    store.call("begin", 1, {"clients": np.arange(3), "groups": np.ones((3, 2), dtype=np.uint8)})

    def opened(place: int, columns: int, counts: int, integers: Any) -> Any:
        asked = group(columns, counts)
        elements = scheme.decode(asked, scheme.encode(asked, integers, numbers, public), numbers, public)
        plan = np.array([place, asked.n_values, asked.n_counts, numbers.max_weight, numbers.max_clients, 5])
        return store.call("open", 1, {"group": plan, "elements": elements, "clients": np.arange(3)})["integers"]

    assert opened(0, 0, 1, COUNTS).tolist() == [0, 0, 0, 3, 9]
    with pytest.raises(PayloadError, match="has been opened before, and was another one"):
        opened(0, 0, 1, np.full(5, 9))
    assert opened(1, 1, 0, VALUES[:, 0]).tolist() == [0, 0, 0, *VALUES[3:, 0]]


def opened_counts(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray[Any, Any]]:
    """The counts of items that key holders give out from now on."""
    given, call = [], KeyStore.call

    def spied(self: KeyStore, method: str, round_index: int, arrays: Arrays) -> Arrays:
        answer = call(self, method, round_index, arrays)
        if method == "open":
            given.append(answer["integers"][arrays["group"][1] :])
        return answer

    monkeypatch.setattr(KeyStore, "call", spied)
    return given


@pytest.mark.parametrize(
    "algorithm",
    [
        "{kind: scolr, rank: 3, rank_policy: uniform}",
        "{kind: scolr, rank: 3, rank_policy: uniform, aggregation: per_component_mean}",
        "{kind: colr, rank: 2}",
    ],
)
def test_the_key_holder_gives_no_row_of_fewer_clients_and_the_rest_is_exact(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, settings = opened_counts(monkeypatch), (f"algorithm={algorithm}", "rounds=2")
    least = [SMALL_CKKS.replace("}", f", smallest_count: {each}}}") for each in (1, 3)]
    open_rows, protected = (experiment(each, *settings) for each in least)
    run_rounds(open_rows)
    before, given[:] = np.concatenate(given), []
    assert ((before > 0) & (before < 3)).sum() > 100, "the control: there are such rows"
    played = run_rounds(protected)
    counts = np.concatenate(given)
    assert not ((counts > 0) & (counts < 3)).any()
    assert (counts >= 3).any()
    plain = experiment("{kind: plain, bits: 16, smallest_count: 3}", *settings)
    assert sha256(protected, played) == sha256(plain, run_rounds(plain))


def test_where_rows_cannot_be_left_out_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match="masks open all rows of a sum or none; use kind: ckks, or larger cohorts"):
        experiment("{kind: masked, smallest_count: 3}")
    for settings, what in (
        (("algorithm={kind: colr, rank: 2, aggregation: weighted}",), "colr on matrix_factorisation"),
        (("algorithm={kind: fedavg}", "model.hidden=[4]"), "fedavg on mlp"),
    ):
        name = "fedavg-digits" if "mlp" in what else "scolr-ml100k"
        with pytest.raises(UserError, match=f"smallest_count = 2: {what} has no counts"):
            prepared(experiment("{kind: plain, smallest_count: 2}", *settings, name=name))
    run_rounds(experiment(SCHEMES[1], "rounds=2"))
    assert caplog.text.count("of 1682 items have counts below 3, and the sums of these rows") == 1
    caplog.clear()
    run_rounds(experiment(SMALL_CKKS.replace("}", ", smallest_count: 3}"), "rounds=1"))
    assert "have counts below" not in caplog.text
    assert CKKS().smallest_count == 1
