"""Every parser of bytes from outside, on mutated inputs: a documented error or a value, in bounded time and memory.

`benchmarks/mutations.py` does the same with 2,000 inputs for each parser, and prints a table.
"""

from __future__ import annotations

import resource
import zlib
from pathlib import Path

import pytest

from chains import CHAINS
from file_parsers import FILES
from mutants import campaign
from narrowcast.platform.config.catalog import CODECS
from payload_parsers import PAYLOADS
from record_parsers import RECORDS
from sampling import sampled

PARSERS = {**PAYLOADS, **FILES, **RECORDS}
MOST_MIB = 512  # that all inputs of one parser together may add to the peak

pytestmark = [
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.timeout(900),
]


def _check(name: str, folder: Path, count: int, seed: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = campaign(PARSERS[name], folder, count, seed)
    print(name, *outcome.counts(), f"{outcome.worst_ms:.0f} ms")
    assert outcome.undocumented == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1024 * MOST_MIB


@pytest.mark.parametrize("name", PARSERS)
def test_a_few_mutations(name: str, tmp_path: Path) -> None:
    _check(name, tmp_path, 25, zlib.crc32(name.encode()))


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(PARSERS, [*PARSERS][::8]))
def test_many_mutations(name: str, tmp_path: Path) -> None:
    _check(name, tmp_path, 200, 0)


def test_every_codec_stage_is_mutated() -> None:
    assert {stage.kind for chain in CHAINS.values() for stage in chain.stages} == set(CODECS)
