"""What algorithms say of themselves: traits by their fields, through secure aggregation, and models of clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from narrowcast.algorithms.codecs.quantise import Cast
from narrowcast.algorithms.federated.aggregator import CoordinateMedian
from narrowcast.algorithms.federated.apfl import APFL
from narrowcast.algorithms.federated.downloads import CodedDownload
from narrowcast.algorithms.federated.fedavg import FedAvg
from narrowcast.algorithms.federated.fedma import FedMA
from narrowcast.algorithms.federated.fedmavg import FedMAvg
from narrowcast.algorithms.federated.fedmd import FedMD
from narrowcast.algorithms.federated.fedmf import FedMF
from narrowcast.algorithms.federated.low_rank import SCoLR
from narrowcast.algorithms.federated.server_optimizer import Momentum
from narrowcast.algorithms.federated.submodel import Submodel
from narrowcast.algorithms.secure.aggregation import SecureAggregation
from narrowcast.algorithms.secure.schemes import Plain
from narrowcast.platform.contracts import Algorithm
from narrowcast.platform.errors import UserError
from narrowcast.platform.traits import Traits

CODEC = (Cast(),)
OTHER_THAN_DEFAULT: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "a mean of models": (FedAvg(), {"counts_draws": True}),
    "a codec": (FedAvg(codec=CODEC), {"counts_draws": True, "codec": CODEC}),
    "an aggregator": (FedAvg(aggregator=CoordinateMedian()), {"needs_each": "aggregator = median"}),
    "a history": (
        FedAvg(download=CodedDownload(step=0.01, rounding="nearest", history=2)),
        {"counts_draws": True, "downloads": "by_client"},
    ),
    "rows asked for": (
        FedMF(download=CodedDownload(step=0.01, rows="touched")),
        {"downloads": "by_client", "asks_rows": True},
    ),
    "coded rows": (FedMF(codec=CODEC), {"codec": CODEC, "codes_row_lists": True}),
    "all rows, coded": (FedMF(codec=CODEC, rows="all"), {"codec": CODEC}),
    "coded components": (SCoLR(codec=CODEC), {"codec": CODEC, "codes_row_lists": True}),
    "factors": (FedMAvg(), {"counts_draws": True, "trains_factors": True}),
    "matched units": (FedMA(), {"downloads": "slices", "grows": True}),
    "nested slices": (Submodel(), {"counts_draws": True}),
    "drawn slices": (Submodel(slices="random"), {"counts_draws": True, "downloads": "slices"}),
    "distillation": (FedMD(), {"global_model": False}),
}


@pytest.mark.parametrize("name", OTHER_THAN_DEFAULT)
def test_traits_follow_from_fields(name: str) -> None:
    algorithm, wanted = OTHER_THAN_DEFAULT[name]
    assert replace(algorithm.traits, mean_unless=None) == Traits(**wanted)


def test_settings_that_take_the_mean_away_are_named() -> None:
    algorithm = FedAvg(codec=CODEC, server_optimizer=Momentum(), server_learning_rate=1.5)
    made = {"algorithm.codec", "algorithm.server_optimizer", "algorithm.server_learning_rate above 1"}
    assert {name for name, is_made in (algorithm.traits.mean_unless or {}).items() if is_made} == made
    assert FedAvg().traits.mean_unless == dict.fromkeys([*made, "algorithm.download"], False)
    assert SCoLR().traits.mean_unless is None


def test_secure_aggregation_shows_the_algorithm_that_it_protects() -> None:
    plain = FedAvg()
    secure = SecureAggregation(plain, Plain(), 8)
    assert secure.plain is plain is plain.plain
    assert secure.secure_sums is secure
    assert plain.secure_sums is None
    assert secure.traits == replace(plain.traits, counts_draws=False)


def test_clients_have_models_of_their_own_where_a_class_says_which() -> None:
    assert [each.personalises for each in (FedAvg(), APFL(), FedMD())] == [False, True, True]


def test_former_names_and_other_types_are_refused_where_a_class_is_defined() -> None:
    with pytest.raises(UserError, match=r"Late\.counts_draws is now Traits\.counts_draws; return it from traits"):

        class Late(FedAvg):
            counts_draws: ClassVar[bool] = True

    with pytest.raises(UserError, match=r"Told\.traits is dict; give Traits of narrowcast\.extend"):

        class Told(FedAvg):
            traits: ClassVar[Any] = {"grows": True}

    with pytest.raises(UserError, match=r"Traits\.mean_unless = 1; give a mapping of settings, or None"):
        Traits(mean_unless=1)  # type: ignore[arg-type]


def test_a_class_variable_is_enough() -> None:
    class Fixed(FedAvg):
        traits: ClassVar[Traits] = Traits(grows=True)

    assert Fixed.traits.grows
    assert not Fixed().traits.counts_draws
