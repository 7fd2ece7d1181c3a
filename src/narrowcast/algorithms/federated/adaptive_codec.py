"""The codec of algorithms whose clients choose their directions and their levels together."""

from __future__ import annotations

from collections.abc import Sequence

from narrowcast.algorithms.codecs.chain import Codec
from narrowcast.algorithms.codecs.entropy import Entropy
from narrowcast.algorithms.codecs.quantise import Quantise
from narrowcast.algorithms.codecs.stage import Stage
from narrowcast.algorithms.codecs.stages import refuse_stateful
from narrowcast.platform.errors import UserError

DEFAULT_CODEC: tuple[Stage, ...] = (
    Quantise(levels=10, norms="column", rounding="dithered", norm_type="bfloat16"),
    Entropy(),
)


def check_adaptive_codec(kind: str, codec: Sequence[Stage]) -> None:
    """Raise `UserError` for a codec without levels to choose, or one that remembers from round to round."""
    if Codec(tuple(codec)).levels is None:
        raise UserError(
            f"algorithm.kind = {kind} does not go with a codec that does not quantise; put quantise into "
            "algorithm.codec"
        )
    refuse_stateful(codec, f"the directions of {kind} change in every round; use it with fedmf or fedavg")
