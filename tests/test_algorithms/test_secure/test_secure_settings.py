"""Settings of `secure` that cannot work are refused before a run starts."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from pydantic import BaseModel

from narrowcast.experiment import load_experiment
from narrowcast.platform.errors import UserError
from narrowcast.platform.rounds.state import Run, start
from narrowcast.platform.types import IntArray, Profiles
from narrowcast.runs.learning import ineffective_settings
from secure_rounds import experiment, prepared


@pytest.mark.parametrize(
    ("secure", "settings_", "message"),
    [
        ("{kind: ckks, ring: 4096}", (), r"prime_bits = \[60, 60\]: 120 bits on a ring of 4096 are below 128-bit"),
        ("{kind: ckks, scale_bits: 9}", (), r"scale_bits = 9: the noise of 10 ciphertexts .* at least 17"),
        ("{kind: ckks, ring: 4096, prime_bits: [40, 60], bits: 24}", (), r"needs 28 bits of a slot, .* at most 18"),
        ("{kind: ckks, prime_bits: [58, 60]}", (), r"secure.prime_bits = .* 32, 36, "),
        ("{kind: masked, threshold: 0.4}", (), r"secure.threshold = 0.4: .*greater than 0.5"),
        ("{kind: cks}", (), r'secure.kind = "cks" is unknown; .* Did you mean "ckks"'),
        (
            "masked",
            ("algorithm={kind: fedmf, codec: [{kind: quantise}]}",),
            r"algorithm.codec \(quantise\) sends cannot",
        ),
        ("ckks", ("clients_per_round=3",), r"smallest_group = 3: 2 clients of a round are enough"),
        ("ckks", ("schedule={kind: buffered, concurrency: 4, buffer_size: 2}",), r"use schedule = synchronous"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_trained(
    secure: str, settings_: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepared(experiment(secure, *settings_))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("scaffold", "scaffold on mlp needs more than the weighted sum .* use fedavg, fedprox"),
        ("{kind: fedavg, aggregator: median}", "algorithm.aggregator = median needs the change of each client"),
    ],
    ids=["scaffold", "median"],
)
def test_what_is_no_sum_of_updates_is_refused(algorithm: str, message: str) -> None:
    chosen = load_experiment("fedavg-digits", [f"algorithm={algorithm}", "secure=ckks"])
    with pytest.raises(UserError, match=f"secure: {message}"):
        prepared(chosen)


@pytest.mark.parametrize(("secure", "missing"), [("ckks", "tenseal"), ("masked", "cryptography")])
def test_a_missing_extra_is_one_line(secure: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=rf"secure.kind = {secure} needs {missing}; pip install 'narrowcast\[he\]'"):
        prepared(experiment(secure))


class HighestRank(BaseModel):
    kind: str = "highest"

    def ranks(self, profiles: Profiles, *_: object) -> IntArray:
        return np.full(len(profiles), 3)


def test_a_rank_policy_of_ones_own_is_refused() -> None:
    chosen = experiment("{kind: masked, bits: 16}")
    own = chosen.algorithm.model_copy(update={"rank_policy": HighestRank()})
    with pytest.raises(UserError, match=r"rank_policy = highest: secure chooses .* uniform, bandwidth and channel"):
        prepared(chosen.model_copy(update={"algorithm": own}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["secure=masked"], True),
        (["secure=masked", "seed=4", "client_seed=4"], True),
        (["secure=masked", "client_seed=4"], False),
        (["secure=plain"], False),  # nothing is hidden
        ([], False),
    ],
)
def test_a_run_says_once_that_its_secrecy_is_simulated(settings: list[str], said: bool) -> None:
    chosen = load_experiment("fedavg-digits", settings)
    algorithm, task = chosen.secured_algorithm, chosen.task(chosen.data_source.load())
    found = [
        each for each in ineffective_settings(chosen, task, start(Run(chosen, algorithm, task))) if "secrecy" in each
    ]
    assert found == said * [
        "secure.kind = masked: the clients' secrecy is simulated, since their private draws follow from seed; set "
        "client_seed to a number of their own if somebody who knows seed must not follow them"
    ]
