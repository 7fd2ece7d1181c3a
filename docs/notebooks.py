"""The pages of docs/ as cells, and the tutorials as notebooks: `python docs/notebooks.py FOLDER`.

A page is Markdown. Blocks of `python` are code. A block of `python` or `yaml` that begins with the comment `# NAME.py`
or `# NAME.yaml` is that file. Each line of a `console` block is a command. A block that begins with `# needs ...`
needs something else than this machine, such as a cluster, and is not run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import nbformat

DOCS = Path(__file__).parent
TUTORIALS = DOCS / "tutorials"
_FENCE = re.compile(r"^```(python|yaml|console)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w[\w-]*\.(?:py|yaml))\n")


@dataclass(frozen=True)
class Block:
    """A piece of a page; `name` is that of the file, if it is one."""

    kind: Literal["text", "python", "console", "file"]
    content: str
    name: str = ""


def tutorials() -> list[Path]:
    """Return the pages of the tutorials, in the order of their names."""
    return sorted(page for page in TUTORIALS.glob("*.md") if page.stem != "index")


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page in their order."""
    text, at = page.read_text(encoding="utf-8"), 0
    for fence in _FENCE.finditer(text):
        language, content = fence.groups()
        file = _FILE.match(content)
        if content.startswith("# needs ") or (language == "yaml" and file is None):
            continue
        yield Block("text", text[at : fence.start()].strip())
        at = fence.end()
        if file is not None:
            yield Block("file", content, file[1])
        else:
            yield Block("console" if language == "console" else "python", content)
    yield Block("text", text[at:].strip())


def notebook(page: Path) -> nbformat.NotebookNode:
    """Return a page as a notebook without outputs: files are written by `%%writefile`, commands run by `!`."""
    cells = []
    for block in blocks(page):
        match block.kind:
            case "text" if block.content:
                cells.append(nbformat.v4.new_markdown_cell(block.content))
            case "file":
                cells.append(nbformat.v4.new_code_cell(f"%%writefile {block.name}\n{block.content}".rstrip()))
            case "console":
                commands = "\n".join(f"!{command}" for command in block.content.splitlines())
                cells.append(nbformat.v4.new_code_cell(commands))
            case "python":
                cells.append(nbformat.v4.new_code_cell(block.content.rstrip()))
    for number, cell in enumerate(cells):
        cell["id"] = str(number)  # else it is random, and no two builds are equal
    made = nbformat.v4.new_notebook(cells=cells)
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return made


def write_notebooks(folder: Path) -> None:
    """Write a notebook for every tutorial into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in tutorials():
        nbformat.write(notebook(page), folder / f"{page.stem}.ipynb")


if __name__ == "__main__":
    write_notebooks(Path(sys.argv[1]))
