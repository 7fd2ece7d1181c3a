"""The kinds of an experiment's `secure` section."""

from __future__ import annotations

from typing import Annotated

from narrowcast.algorithms.secure.ckks_scheme import CKKS
from narrowcast.algorithms.secure.paillier_scheme import Paillier
from narrowcast.algorithms.secure.protection import Masked, NoProtection, Plain, Protection
from narrowcast.platform.kinds import Registry

SCHEMES = Registry(
    "secure", Protection, {"none": NoProtection, "plain": Plain, "masked": Masked, "ckks": CKKS, "paillier": Paillier}
)
AnyScheme = Annotated[NoProtection | Protection, SCHEMES]
