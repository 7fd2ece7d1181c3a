"""The plain values, without secrets, of a file that is run, and the identity of its results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowcast.platform.config import flatten, write_yaml
from narrowcast.platform.field_roles import role_of
from narrowcast.platform.section import Section
from narrowcast.platform.tracking.store_address import Tracking


class Identified(Section):
    """A frozen model of a whole run, which reads from and writes to YAML; `Role` says which fields are its identity."""

    def plain(self) -> dict[str, Any]:
        """Nested plain values, as the YAML file has them, without secrets."""
        values: dict[str, Any] = json.loads(self.model_dump_json())
        for name, value in self:
            if isinstance(value, Tracking):
                values[name] = json.loads(value.without_secrets().model_dump_json())
        return values

    def save(self, path: str | Path) -> Path:
        """Write all values, without passwords, to a YAML file that gives the same results."""
        path = Path(path)
        write_yaml(self.plain(), path)
        return path

    def identity(self) -> dict[str, Any]:
        """Return the dotted values that the results of a round or iteration depend on."""
        return self.identity_of(self.plain())

    @classmethod
    def identity_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the nested values that are part of the identity, by dotted path."""
        return flatten({key: value for key, value in values.items() if role_of(cls, key).identity})

    def digest(self) -> str:
        """Return the sha256 of `identity`."""
        return digest_of(self.identity())


def digest_of(identity: Mapping[str, Any]) -> str:
    """Return the sha256 of an identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
