"""Checkpoints: one safetensors file, replaced atomically; loading one never runs code."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from narrowcast.platform.errors import UserError
from narrowcast.platform.interruption import uninterrupted
from narrowcast.platform.run_state import RunState

_FILE = "state.safetensors"
_FORMAT = "narrowcast-2"
_TENSORS = ("participants", "last_round", "update_bits")
_NUMBERS = ("round_index", "uplink_bits", "downlink_bits")


def save_checkpoint(folder: Path, state: RunState, digest: str) -> None:
    """Write the state of a run whose configuration has this digest; a crash leaves the former file whole."""
    tensors = {name: getattr(state, name) for name in _TENSORS}
    tensors |= {f"server/{name}": np.ascontiguousarray(values) for name, values in state.server.items()}
    tensors |= {f"clients/{name}": np.ascontiguousarray(values) for name, values in state.clients.items()}
    tensors |= {f"schedule/{name}": np.ascontiguousarray(values) for name, values in state.schedule.items()}
    numbers = {name: str(getattr(state, name)) for name in _NUMBERS}
    metadata = {
        **numbers,
        "simulated_seconds": state.simulated_seconds.hex(),
        "config": digest,
        "format": _FORMAT,
    }
    write_atomically(folder / _FILE, save(tensors, metadata))


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file by new content, wholly or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with uninterrupted():
        with part.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)


def load_checkpoint(folder: Path) -> tuple[RunState, str]:
    """The last saved state and the digest of its configuration; raises `UserError` where it is missing or damaged."""
    path = folder / _FILE
    if not path.is_file():
        raise UserError(f"no checkpoint in {folder}; the run stopped before its first one, start it again")
    try:
        with safe_open(path, framework="np") as stored:
            metadata = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a dict
        if metadata.get("format") != _FORMAT:
            raise UserError(f'{path} has format "{metadata.get("format")}"; this version reads {_FORMAT}')
        state = RunState(
            round_index=int(metadata["round_index"]),
            uplink_bits=int(metadata["uplink_bits"]),
            downlink_bits=int(metadata["downlink_bits"]),
            simulated_seconds=float.fromhex(metadata["simulated_seconds"]),
            participants=tensors["participants"],
            last_round=tensors["last_round"],
            update_bits=tensors["update_bits"],
            server=_under("server/", tensors),
            clients=_under("clients/", tensors),
            schedule=_under("schedule/", tensors),
        )
        return state, metadata["config"]
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged ({error}); delete the run's folder and start it again") from error


def _under(prefix: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): values for name, values in tensors.items() if name.startswith(prefix)}
