"""SFMF on the excerpt of its released code: the central program, and the federated one in the clear and encrypted.

Reference: Chai et al., Secure Federated Matrix Factorization, IEEE Intelligent Systems 2020 (arXiv:1906.05108); the
released code and its logs (Di-Chai/FedMF): the 40 items of MovieLens latest-small with the most ratings, the seven of
the first ten users with five of them or more, the last three of each user for testing. Both factors begin at 0.01, so
that all 100 columns stay equal: it is a model of rank 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from narrowcast.platform.data.rating_matrix import ExplicitRatings
from narrowcast.platform.tracking.units import format_bits
from narrowcast.platform.types import FloatArray
from narrowcast.studies.execution import Planned
from narrowcast.studies.results import Rows
from narrowcast.studies.spec import RunSpec, slug
from narrowcast.studies.tables import StudyTable
from narrowcast.studies.tuning import finished
from narrowcast.studies.verdicts import PaperVerdict

STUDY = "sfmf"
ROUNDS, RANK, START, RATE, DECAY = 175, 100, 0.01, 1e-3, 1e-4
EXCERPT = "set: ml-latest-small, first_users: 10, top_items: 40, min_ratings: 5, split: last, test_last: 3"
_INTEGERS = "bits: 20, clip: 0.0625, rounding: nearest"


@dataclass(frozen=True)
class SFMFSetting:
    """One way to send the gradients; `published`: the error in the log of the released code, if it has one."""

    name: str
    rows: str = "all"
    dtype: str = "float64"
    secure: str = "none"
    published: float | None = None

    @property
    def run(self) -> RunSpec:
        """The run of this setting."""
        return RunSpec(
            f"{STUDY}-{slug(self.name)}",
            "fedavg-digits",
            (
                f"data={{kind: explicit_ratings, {EXCERPT}}}",
                f"model={{kind: masked_factorisation, rank: {RANK}, centred: false, initial: constant, "
                f"initial_scale: {START}, dtype: {self.dtype}}}",
                f"algorithm={{kind: sfmf, rows: {self.rows}}}",
                f"training={{kind: rating_sgd, learning_rate: {RATE}, weight_decay: {DECAY}}}",
                f"secure={self.secure}",
                "clients_per_round=7",
                "sampling=uniform",
                f"rounds={ROUNDS}",
                f"evaluate_every={ROUNDS}",
                "checkpoint_seconds=100000",
            ),
            most_seeds=1,
        )


SETTINGS = (
    SFMFSetting("full, float64", published=1.3965372),
    SFMFSetting("part, float32", "touched", "float32", published=1.3965372),
    *(
        SFMFSetting(f"full, {scheme}", secure=f"{{kind: {scheme}, {_INTEGERS}}}", published=published)
        for scheme, published in (("plain", None), ("masked", None), ("ckks", None), ("paillier", 1.3965372))
    ),
)
"""Nothing is drawn at random but masks, keys and noise, which leave the model as it is: one seed."""


@dataclass(frozen=True)
class Central:
    """The central program after its last iteration: mean squared training error, and root of the test one."""

    loss: float
    rmse: float


def run_central() -> Central:
    """Take the steps of all users on one pair of factors, rating by rating, in the order of users and times."""
    fields = {"first_users": 10, "top_items": 40, "min_ratings": 5, "split": "last", "test_last": 3}
    data = ExplicitRatings.model_validate({"set": "ml-latest-small", **fields}).load()
    h, w = np.full((data.n_users, RANK), START), np.full((data.n_items, RANK), START)
    train, test = data.part("train"), data.part("test")
    for _ in range(ROUNDS):
        for user, item, value in zip(*(column.tolist() for column in train), strict=True):
            error = value - h[user] @ w[item]
            h[user] = h[user] - RATE * (-2 * error * w[item] + 2 * DECAY * h[user])
            w[item] = w[item] - RATE * (-2 * error * h[user] + 2 * DECAY * w[item])

    def squares(users: object, items: object, values: FloatArray) -> FloatArray:
        return np.square([value - h[u] @ w[i] for u, i, value in zip(users, items, values, strict=True)])  # type: ignore[call-overload]

    return Central(float(np.mean(squares(*train))), float(np.sqrt(np.mean(squares(*test)))))


_CENTRAL_LOSS, _CENTRAL_ERROR = 0.732655866937412, 1.3969165
"""The last lines of the log of the released central program."""
_TOLERANCE = 1e-5
"""The released code rounds encrypted values to this."""


def judge_sfmf(rows: Rows) -> list[PaperVerdict]:
    """Compare the central program and each way to send with the published logs."""
    central = run_central()
    verdicts = [
        _verdict("central, training loss", _CENTRAL_LOSS, central.loss, 1e-14),
        _verdict("central, test RMSE", _CENTRAL_ERROR, central.rmse, 1e-7),
    ]
    errors = {}
    for setting in SETTINGS:
        if not (runs := finished(rows, setting.run)):
            continue
        error, run = runs[0]["final"]["test.rmse"], runs[0]
        errors[setting.name] = error
        clear = errors.get("full, float64", error)
        bits = f"uplink {format_bits(run['uplink_bits'])}, downlink {format_bits(run['downlink_bits'])}"
        said = f"{bits}, {run['wall_seconds']:.0f} s, {error - clear:+.1e} from float64"
        if setting.published is None:
            verdicts.append(PaperVerdict(setting.name, "", f"{error:.7f}", said, by_seed=(error,)))
        else:
            verdicts.append(_verdict(setting.name, setting.published, error, _TOLERANCE, f"; {said}"))
    return verdicts


def _verdict(what: str, published: float, ours: float, tolerance: float, besides: str = "") -> PaperVerdict:
    close = abs(ours - published) <= tolerance
    said = f"reproduced, within {tolerance:g}" if close else f"differs by more than {tolerance:g}"
    return PaperVerdict(what, f"{published}", f"{ours:.15g}", said + besides, f"{ours - published:+.1e}", (ours,))


def _sfmf(rows: Rows) -> Iterator[Planned]:
    del rows
    for setting in SETTINGS:
        yield Planned(STUDY, setting.run, 0)


SFMF = StudyTable({STUDY: _sfmf}, judge_sfmf)
