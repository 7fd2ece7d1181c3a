"""Next-token prediction on the language reference that comes with Python, a text that needs no download."""

from __future__ import annotations

import platform
from typing import Literal

from narrowcast.platform.data.documents import Documents
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError


class PythonDocs(Documents):
    """The pages of Python's language reference, 465 kB of English with code; each page has a client of its own.

    The text is that of the running Python's `help()`; its version is part of the data set's name.
    """

    kind: Literal["python-docs"] = "python-docs"

    def load(self) -> Samples:
        """Return the windows of the pages; raise `UserError` if this Python came without them."""
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise UserError(f"python-docs: {error}; use another build of Python, or data text_files") from error
        texts = {topic: text.encode() for topic, text in sorted(topics.items())}
        return self._windows(f"{self.kind}-{platform.python_version()}", "pydoc_data.topics", texts)
