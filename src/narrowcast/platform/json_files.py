"""JSON files that a run or a study has written and reads again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from narrowcast.platform.errors import UserError
from narrowcast.platform.links import own_file


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file; raise `UserError` with the remedy if it is unreadable or no object."""
    own_file(path.parent, path.name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: unreadable ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected an object, got {type(content).__name__}; {remedy}")
    return content
