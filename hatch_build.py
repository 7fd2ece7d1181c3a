"""The README as an index of packages shows it, where no link is relative to the repository."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = re.compile(r"(!?)\[([^\]\n]*(?:\n[^\]\n]+)?)\]\((?!https?://|#)([^)\s]+)\)")


class Readme(MetadataHookInterface):
    """Links begin with NARROWCAST_REPOSITORY, such as https://host/owner/name/blob/v1; without it they are text."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README to the metadata of a wheel or an sdist."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("NARROWCAST_REPOSITORY", "").rstrip("/")
        metadata["readme"] = {"content-type": "text/markdown", "text": on_an_index(text, repository)}


def on_an_index(text: str, repository: str) -> str:
    """Return the text with absolute links; without a repository, with their labels, and without images."""

    def absolute(link: re.Match[str]) -> str:
        image, label, target = link.groups()
        if not repository:
            return "" if image else label
        return f"{image}[{label}]({repository}/{target}{'?raw=true' if image else ''})"

    return _RELATIVE.sub(absolute, text)
