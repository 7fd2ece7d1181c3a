"""The pages of papers on the site: the README of each paper, with links as they are from there."""

from __future__ import annotations

import os
import re
from pathlib import Path

PAPERS = Path(__file__).parent.parent / "papers" / "narrowcast_papers"
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def readmes() -> list[Path]:
    """Return the README of every paper, in the order of their names."""
    return sorted(PAPERS.glob("*/README.md"))


def write_papers(folder: Path) -> None:
    """Write NAME.md for each paper; figures and CSV files stay where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for readme in readmes():
        page = folder / f"{readme.parent.name}.md"
        page.write_text(
            _LINK.sub(lambda link, at=readme.parent: f"]({_moved(at / link[1], folder)}", readme.read_text())
        )


def _moved(target: Path, folder: Path) -> str:
    """Return the link from the folder to a file, or to the page of another paper."""
    target = Path(os.path.normpath(target))
    if target.name == "README.md" and target.parent.parent == PAPERS:
        return f"{target.parent.name}.md"
    return os.path.relpath(target, folder)
