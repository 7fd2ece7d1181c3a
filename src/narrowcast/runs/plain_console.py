"""The terminal of all tables and displays, which shows texts as they are.

Rich takes brackets in a text for markup, and passes escapes on: a name in a file of somebody else could end the
command, or write to the terminal in place of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from narrowcast.platform.errors import printable


class PlainConsole(Console):
    """A console without markup, which prints no character of a text that a terminal would obey."""

    def __init__(self, **options: Any) -> None:
        """Take the options of a `Console`; `file` is stdout by default."""
        own: dict[str, Any] = {"file": getattr(sys.stdout, "unfiltered", None), "markup": False, "emoji": False}
        super().__init__(**(own | options))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of what is printed; those of a control are the console's own.

        Nothing stands in place of what is left out, since the widths of columns do not count it.
        """
        for each in super().render(renderable, options):
            yield each if each.control else Segment(printable(each.text, "\n", instead=""), each.style)
