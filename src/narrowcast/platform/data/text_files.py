"""Text of one's own for next-token prediction: a folder of files, one client per file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from narrowcast.platform.data.documents import Documents
from narrowcast.platform.data.own_files import located
from narrowcast.platform.data.samples import Samples
from narrowcast.platform.errors import UserError


class TextFiles(Documents):
    """Next-token prediction on the text files below a folder; each file is a document and has a client of its own."""

    kind: Literal["text_files"] = "text_files"
    path: Path = Field(description="folder of the files, also in folders below it")
    pattern: str = Field("*.txt", min_length=1, description="names of the files, with * and ?")

    def load(self) -> Samples:
        """Return the windows of the files; raise `UserError` if there are none or one cannot be read."""
        folder = located(self.path, "path")
        if not folder.is_dir():
            raise UserError(f"data.path = {folder} is a file; give the folder that holds it")
        try:
            files = sorted(file for file in folder.rglob(self.pattern) if file.is_file())
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"data.pattern = {self.pattern}: {error}; use a name with * or ?, such as *.txt") from error
        if not files:
            raise UserError(f"{folder} has no file {self.pattern}; give another path or pattern")
        texts = {}
        for file in files:
            try:
                texts[str(file.relative_to(folder))] = file.read_bytes()
            except OSError as error:
                raise UserError(f"{file}: {error.strerror}; make it readable, or leave it out by pattern") from error
        return self._windows(folder.name or str(folder), str(folder), texts)
