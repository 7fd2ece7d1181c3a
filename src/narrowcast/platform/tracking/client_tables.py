"""The tables of a run's clients from the entries of its journal, in blocks of rounds, so that memory is bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from narrowcast.platform.outcome import CLIENT_METRICS
from narrowcast.platform.types import Profiles

ROWS_AT_ONCE = 50_000
"""Rows of a block, but for those of its last round."""
_FLOATS, _FLAGS = {"seconds", "loss", "uplink_bits_per_second"}, {"delivered", "late"}
Entry = Mapping[str, Any]


def clients_schema(columns: Iterable[str], metrics: Iterable[str]) -> pa.Schema:
    """Return the schema of `clients_blocks`, from the columns of a ledger and the metrics of clients."""
    names = ("round", *columns, "uplink_bits_per_second", *metrics)
    floats = {*_FLOATS, *metrics}
    types = [pa.float64() if name in floats else pa.bool_() if name in _FLAGS else pa.int64() for name in names]
    return pa.schema(zip(names, types, strict=True))


def clients_blocks(entries: Iterable[Entry], schema: pa.Schema, profiles: Profiles) -> Iterator[pa.Table]:
    """Yield blocks of one row per participation of a client in a round, with the client's uplink rate.

    Metrics of the client are those after the round, null in rounds without an evaluation of clients.
    """
    for block in _blocks(entries, lambda entry: len(entry["clients"]["client"])):
        yield pa.Table.from_arrays([_column(name, block, profiles, schema) for name in schema.names], schema=schema)


def _column(name: str, block: Sequence[Entry], profiles: Profiles, schema: pa.Schema) -> pa.Array:
    clients = [entry["clients"]["client"] for entry in block]
    if name == "round":
        return pa.array(np.repeat([entry["round"]["round"] for entry in block], [len(each) for each in clients]))
    if name == "uplink_bits_per_second":
        return pa.array(profiles.uplink_bits_per_second[[client for each in clients for client in each]])
    if name in block[0]["clients"]:
        return pa.array((value for entry in block for value in entry["clients"][name]), schema.field(name).type)
    measured = [entry.get(CLIENT_METRICS, {}).get(name) for entry in block]
    values = (
        None if of_all is None else of_all[client]
        for of_all, chosen in zip(measured, clients, strict=True)
        for client in chosen
    )
    return pa.array(values, pa.float64())


def client_metrics_schema(metrics: Iterable[str]) -> pa.Schema:
    """Return the schema of `client_metrics_blocks`."""
    return pa.schema([("round", pa.int64()), ("client", pa.int64()), *((name, pa.float64()) for name in metrics)])


def client_metrics_blocks(entries: Iterable[Entry], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield blocks of one row per client and evaluated round, for all clients."""
    evaluated = (entry for entry in entries if CLIENT_METRICS in entry)
    for block in _blocks(evaluated, _n_measured):
        sizes = [_n_measured(entry) for entry in block]
        columns = [
            pa.array(np.repeat([entry["round"]["round"] for entry in block], sizes)),
            pa.array(np.concatenate([np.arange(size) for size in sizes])),
        ]
        for name in schema.names[2:]:
            parts = (entry[CLIENT_METRICS].get(name, [None] * size) for entry, size in zip(block, sizes, strict=True))
            columns.append(pa.array((value for part in parts for value in part), pa.float64()))
        yield pa.Table.from_arrays(columns, schema=schema)


def _n_measured(entry: Entry) -> int:
    return len(next(iter(entry[CLIENT_METRICS].values())))


def _blocks(entries: Iterable[Entry], n_rows: Callable[[Entry], int]) -> Iterator[list[Entry]]:
    block: list[Entry] = []
    rows = 0
    for entry in entries:
        block.append(entry)
        rows += n_rows(entry)
        if rows >= ROWS_AT_ONCE:
            yield block
            block, rows = [], 0
    if block:
        yield block
