"""The kinds of an experiment's `secure` section."""

from __future__ import annotations

from typing import Annotated

from narrowcast.algorithms.secure.protection import NoProtection, Protection
from narrowcast.platform.kinds import Registry

SCHEMES = Registry(
    "secure",
    Protection,
    {
        "none": "algorithms.secure.protection:NoProtection",
        "plain": "algorithms.secure.protection:Plain",
        "masked": "algorithms.secure.protection:Masked",
        "ckks": "algorithms.secure.ckks_scheme:CKKS",
        "paillier": "algorithms.secure.paillier_scheme:Paillier",
    },
)
AnyScheme = Annotated[NoProtection | Protection, SCHEMES]
