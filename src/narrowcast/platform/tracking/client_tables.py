"""The tables of a run's clients, from the entries of its journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from narrowcast.platform.outcome import CLIENT_METRICS
from narrowcast.platform.types import Profiles

Entry = Mapping[str, Any]


def clients_table(entries: Sequence[Entry], profiles: Profiles) -> pa.Table:
    """Return one row per participation of a client in a round, with the client's uplink rate.

    Metrics of the client are those after the round, null in rounds without an evaluation of clients.
    """
    ledgers = [entry["clients"] for entry in entries]
    names = ledgers[0] if ledgers else {}
    columns: dict[str, list[Any]] = {name: [value for ledger in ledgers for value in ledger[name]] for name in names}
    rounds = [entry["round"]["round"] for entry in entries for _ in entry["clients"]["client"]]
    rates = profiles.uplink_bits_per_second[columns.get("client", [])].tolist() if rounds else []
    metrics = {
        name: [
            measured[name][client] if name in measured else None
            for entry in entries
            for measured in [entry.get(CLIENT_METRICS, {})]
            for client in entry["clients"]["client"]
        ]
        for name in _metrics(entries)
    }
    floats = {name: pa.array(values, pa.float64()) for name, values in metrics.items()}
    return pa.table({"round": rounds, **columns, "uplink_bits_per_second": rates, **floats})


def client_metrics_table(entries: Sequence[Entry]) -> pa.Table | None:
    """Return one row per client and evaluated round, for all clients; None if no round evaluated them."""
    found = [(entry["round"]["round"], entry[CLIENT_METRICS]) for entry in entries if CLIENT_METRICS in entry]
    if not found:
        return None
    sizes = [len(next(iter(measured.values()))) for _, measured in found]
    columns = {
        "round": pa.array(np.repeat([number for number, _ in found], sizes)),
        "client": pa.array(np.concatenate([np.arange(size) for size in sizes])),
    }
    for name in _metrics(entries):
        values = [measured.get(name, [None] * size) for (_, measured), size in zip(found, sizes, strict=True)]
        columns[name] = pa.array([value for part in values for value in part], pa.float64())
    return pa.table(columns)


def _metrics(entries: Sequence[Entry]) -> list[str]:
    """Return the names of the metrics of any round."""
    return list(dict.fromkeys(name for entry in entries for name in entry.get(CLIENT_METRICS, ())))
