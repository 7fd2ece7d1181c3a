"""The tutorials as notebooks: `python docs/notebooks.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat

from pages import blocks, tutorials


def notebook(page: Path) -> nbformat.NotebookNode:
    """Return a page as a notebook without outputs: files are written by `%%writefile`, commands run by `!`."""
    cells = []
    for block in blocks(page):
        match block.kind:
            case "text" if block.content:
                cells.append(nbformat.v4.new_markdown_cell(block.content))
            case "python" | "console" | "yaml" if block.kind == "yaml" or block.not_run or block.data:
                cells.append(nbformat.v4.new_markdown_cell(f"```{block.kind}\n{block.content}```"))
            case "file":
                cells.append(nbformat.v4.new_code_cell(f"%%writefile {block.name}\n{block.content}".rstrip()))
            case "console":
                commands = "\n".join(f"!{command}" for command in block.commands)
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
