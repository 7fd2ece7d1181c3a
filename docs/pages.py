"""The pages of docs/ and the README as blocks: text, files that a page writes, code and commands.

A page is Markdown. Blocks of `python` are code, and each line of a `console` block is a command. A block of `python`,
`yaml` or `text` that begins with the comment `# NAME.py`, `# NAME.yaml` or the like is that file; other blocks are
shown. An HTML comment on the line before a block says what running it takes:

    <!-- data: ml-100k, gset -->        data sets that no package brings, by the names of `narrowcast data fetch`
    <!-- not run: a Ray cluster -->     what a test does not have, or more time than it may take
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DOCS = Path(__file__).parent
TUTORIALS = DOCS / "tutorials"
_FENCE = re.compile(
    r"^(?:<!-- (data|not run): ([^\n]+) -->\n)?```(python|yaml|text|console)\n(.*?)^```\n", re.MULTILINE | re.DOTALL
)
_FILE = re.compile(r"# (\w[\w-]*\.(?:py|yaml|txt|dat-s))\b[^\n]*\n")


@dataclass(frozen=True)
class Block:
    """A piece of a page: `name` is that of the file, if it is one, `data` the sets that it needs."""

    kind: Literal["text", "python", "console", "file", "yaml"]
    content: str
    name: str = ""
    data: tuple[str, ...] = ()
    not_run: str = ""

    @property
    def commands(self) -> list[str]:
        """The commands of a console, each on one line, without comments and prompts."""
        assert self.kind == "console"
        lines = re.sub(r"\\\n *|^\$ ", "", self.content, flags=re.MULTILINE).splitlines()
        return [re.sub(r"(^| +)# .*", "", line) for line in lines]


def pages() -> list[Path]:
    """Return the README, the pages of the site that somebody wrote and those of papers, in the order of their names."""
    made = {page for folder in ("reference", "papers") for page in (DOCS / folder).rglob("*.md")}
    papers = sorted((DOCS.parent / "papers").rglob("README.md"))
    return [DOCS.parent / "README.md", *sorted({*DOCS.rglob("*.md")} - made), *papers]


def tutorials() -> list[Path]:
    """Return the pages of the tutorials, in the order of their names."""
    return sorted(page for page in TUTORIALS.glob("*.md") if page.stem != "index")


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page in their order."""
    text, at = page.read_text(encoding="utf-8"), 0
    for fence in _FENCE.finditer(text):
        mark, reason, language, content = fence.groups()
        file = _FILE.match(content)
        kind: Literal["python", "console", "file", "yaml"]
        match language:
            case "text" | "yaml" | "python" if file is not None:
                kind = "file"
            case "console" | "python" | "yaml":
                kind = language
            case _:
                continue
        yield Block("text", text[at : fence.start()].strip())
        at = fence.end()
        yield Block(
            kind,
            content.partition("\n")[2] if language == "text" else content,
            name=file[1] if file is not None and kind == "file" else "",
            data=tuple(reason.split(", ")) if mark == "data" else (),
            not_run=reason if mark == "not run" else "",
        )
    yield Block("text", text[at:].strip())
