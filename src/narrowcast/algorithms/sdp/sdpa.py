"""Semidefinite programs from files in the sparse format of SDPA, as of the collection SDPLIB."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from narrowcast.algorithms.sdp.certificate import Proof
from narrowcast.algorithms.sdp.semidefinite_program import LOWER_IS_BETTER, SemidefiniteProgram
from narrowcast.algorithms.sdp.symmetric_constraints import constraints_of
from narrowcast.algorithms.sdp.weighted_graph import MOST_WEIGHT
from narrowcast.platform.data.own_files import located, readable
from narrowcast.platform.errors import UserError
from narrowcast.platform.section import Section
from narrowcast.platform.types import FloatArray, IntArray

MOST_SIDE = 10**6
"""Side of X."""
_SEPARATORS = re.compile(r"[\s,(){}]+")
_ADVICE = "give lines m, number of blocks, sizes of blocks, targets, then a line `matrix block row column value` each"


class SDPAFile(Section):
    """A semidefinite program in the sparse format of SDPA (.dat-s): minimise -<F_0, Y>, <F_i, Y> = c_i, Y >= 0.

    This is the dual of the two problems that the format states, so that `objective` is the negative of the optimum of
    SDPLIB's tables. Blocks stand along the diagonal of one matrix: no entry outside them is in any F, so that the
    optimum is the same. Entries of one triangle or of both are read; a block of the negative size -n is a diagonal.

    Source: Fujisawa, Kojima, Nakata and Yamashita, SDPA User's Manual, 2002; Borchers, SDPLIB 1.2, Optimization Methods
    and Software 11, 1999.
    """

    lower_is_better: ClassVar[tuple[str, ...]] = LOWER_IS_BETTER

    kind: Literal["sdpa"] = "sdpa"
    path: Path = Field(description="file in the sparse format of SDPA, .dat-s")
    trace_bound: float | None = Field(
        None, gt=0, description="number that the trace of no feasible Y exceeds; null: as the constraints imply, if so"
    )
    proof: Proof = Field(
        "lanczos",
        description="proof of the bound: least Ritz value less its error, or a sparse factorisation, which is nearer",
    )

    def load(self) -> SemidefiniteProgram:
        """Return the program; raise `UserError` if the file is none."""
        path = located(self.path, "path", "problem")
        with (
            readable(path, (OSError, UnicodeDecodeError, ValueError), _ADVICE),
            path.open(encoding="utf-8-sig") as file,
        ):
            lines = [line for line in file if line.strip() and line[0] not in '"*']
        try:
            with readable(path, (ValueError, OverflowError), _ADVICE):
                return self._program(path, [_words(line) for line in lines])
        except UserError as error:
            raise UserError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from error

    def _program(self, path: Path, lines: list[list[str]]) -> SemidefiniteProgram:
        if len(lines) < 4:
            raise UserError(f"ends after {len(lines)} lines; is the file cut off? {_ADVICE}")
        count, blocks = (_first_number(line) for line in lines[:2])
        sizes = np.array(lines[2][:blocks], dtype=np.int64)
        targets = np.array(lines[3], dtype=np.float64)
        if len(sizes) != blocks:
            raise UserError(f"has {len(sizes)} sizes of blocks, but its second line says {blocks}; is it cut off?")
        if len(targets) != count:
            raise UserError(f"has {len(targets)} targets, but its first line says {count} constraints; is it cut off?")
        if not count or (sizes == 0).any() or np.abs(sizes).sum() > MOST_SIDE:
            rows = int(np.abs(sizes).sum())
            raise UserError(f"has {count} constraints and blocks of {rows} rows; 1 to {MOST_SIDE} are allowed")
        for place, row in enumerate(lines[4:]):
            if len(row) != 5:
                reason = "; is the file cut off?" if place == len(lines) - 5 else ""
                raise UserError(f"entry {place + 1} is {' '.join(row)[:60]!r}{reason}; {_ADVICE}")
        places = np.array([row[:4] for row in lines[4:]], dtype=np.int64).reshape(-1, 4)
        value = np.array([row[4] for row in lines[4:]], dtype=np.float64)
        for what, numbers in (("target", targets), ("entry", value)):
            if len(wrong := np.flatnonzero(~(np.abs(numbers) <= MOST_WEIGHT))):
                raise UserError(
                    f"{what} {wrong[0] + 1} has the value {numbers[wrong[0]]:g}; give finite values of at most "
                    f"{MOST_WEIGHT:g}"
                )
        _check(places, count, sizes)
        return self._of_entries(path, places, value, targets, sizes)

    def _of_entries(
        self, path: Path, places: IntArray, value: FloatArray, targets: FloatArray, sizes: IntArray
    ) -> SemidefiniteProgram:
        side = int(np.abs(sizes).sum())
        before = np.concatenate([[0], np.cumsum(np.abs(sizes))])[places[:, 1] - 1]
        row, column = before + places[:, 2] - 1, before + places[:, 3] - 1
        first = places[:, 0] == 0
        cost = constraints_of(side, 1, places[first, 0], row[first], column[first], -value[first], first_number=0)
        matrix = places[~first, 0] - 1
        constraints = constraints_of(side, len(targets), matrix, row[~first], column[~first], value[~first])
        stated = cost.adjoint(np.ones(1))
        return SemidefiniteProgram(path.stem, str(path), stated, constraints, targets, self.trace_bound, self.proof)


def _words(line: str) -> list[str]:
    return [word for word in _SEPARATORS.split(line) if word]


def _first_number(line: list[str]) -> int:
    """Return the number that a line begins with: the format allows words after it."""
    if not line or not line[0].lstrip("+").isdecimal():
        raise UserError(f"has a line {' '.join(line)[:60]!r} in place of a number; {_ADVICE}")
    return int(line[0])


def _check(places: IntArray, count: int, sizes: IntArray) -> None:
    """Raise `UserError` for an entry [matrix, block, row, column] outside the matrices or off a diagonal block."""
    for column, label, least, most in ((0, "matrix", 0, count), (1, "block", 1, len(sizes))):
        if len(wrong := np.flatnonzero((places[:, column] < least) | (places[:, column] > most))):
            got = places[wrong[0], column]
            raise UserError(f"entry {wrong[0] + 1} has the {label} {got}; {least} to {most} are allowed")
    size = np.abs(sizes)[places[:, 1] - 1]
    for column, label in ((2, "row"), (3, "column")):
        if len(wrong := np.flatnonzero((places[:, column] < 1) | (places[:, column] > size))):
            block, got = places[wrong[0], 1], places[wrong[0], column]
            raise UserError(f"entry {wrong[0] + 1} has the {label} {got}; block {block} has 1 to {size[wrong[0]]}")
    diagonal = sizes[places[:, 1] - 1] < 0
    if len(wrong := np.flatnonzero(diagonal & (places[:, 2] != places[:, 3]))):
        raise UserError(f"entry {wrong[0] + 1} is off the diagonal of block {places[wrong[0], 1]}, which is diagonal")
