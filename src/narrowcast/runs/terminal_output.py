"""Output to a terminal: texts of others are shown as they are, and output without a reader does not end a run.

A name in a file of somebody else could have escapes, which a terminal obeys, or brackets, which Rich takes for markup.
A closed pipe, terminal or stream, or a full disk, takes no more output.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from narrowcast.platform.errors import printable

logger = logging.getLogger(__name__)
_LAYOUT = "\n\t\xa0"
"""Characters of printed text that are not letters."""
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # EIO: the terminal was closed


def plain(text: str) -> str:
    """Return the text with its layout, without what a terminal or page would obey."""
    return printable(text, _LAYOUT)


class PlainConsole(Console):
    """A console without markup, which prints no character of a text that a terminal would obey."""

    def __init__(self, **options: Any) -> None:
        """Take the options of a `Console`; `file` is stdout by default."""
        file = sys.stdout.unfiltered if isinstance(sys.stdout, OutputUntilClosed) else None
        defaults: dict[str, Any] = {"file": file, "markup": False, "emoji": False}
        super().__init__(**(defaults | options))

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of what is printed; those of a control are the console's own.

        Nothing stands in place of what is left out, since the widths of columns do not count it.
        """
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text, "\n", instead=""), segment.style)


def open_missing_streams() -> None:
    """Let stdout and stderr discard what is printed if the process was started without them (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - as long as the process


def discard_output() -> None:
    """Discard what is printed from here on, as after `narrowcast run ... | head`; of stderr, if it is a terminal."""
    _discard(sys.stdout)
    if sys.stderr.isatty():
        _discard(sys.stderr)


def discard_unread() -> None:
    """Discard what is still to be flushed if its reader has gone, on which Python would exit with status 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if error.errno not in (*_GONE, errno.ENOSPC):
                raise
            _discard(stream)


class OutputUntilClosed:
    """A text stream for `sys.stdout` that takes what is printed, also once its reader has gone.

    What is printed may come from files of others, so that commands to a terminal are left out of it. `unfiltered` is
    for what narrowcast itself tells the terminal.
    """

    def __init__(self, stream: TextIO, *, filtered: bool = True) -> None:
        self._stream, self._filtered = stream, filtered

    @property
    def unfiltered(self) -> OutputUntilClosed:
        """The same stream, with escapes."""
        return OutputUntilClosed(self._stream, filtered=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text, or discard it; return its length."""
        with output_may_end():
            self._stream.write(plain(text) if self._filtered else text)
        return len(text)

    def flush(self) -> None:
        """Flush what was written, or discard it."""
        with output_may_end():
            self._stream.flush()


def _discard(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextmanager
def output_may_end() -> Iterator[None]:
    """Discard output from here on if the reader of what the block prints has gone."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            logger.warning("the output is lost from here on (%s)", error.strerror)
        elif error.errno not in _GONE:
            raise
        discard_output()
