"""The table of SFMF: errors beside those of the released code's logs, with the megabytes and seconds of encryption."""

from __future__ import annotations

from narrowcast.platform.tracking.units import format_bits
from narrowcast.reproduce.long_studies import finished
from narrowcast.reproduce.results_csv import Rows
from narrowcast.reproduce.sfmf_excerpt import SETTINGS, run_central
from narrowcast.reproduce.verdict import PaperVerdict

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
