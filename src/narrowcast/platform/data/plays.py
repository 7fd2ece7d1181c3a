"""The lines of each character of Shakespeare's plays, extracted from the plays' web pages."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from narrowcast.platform.data.sources import retrieve

BY_CHARACTER = "by_play_and_character.json.xz"
_SPEAKER_OR_LINE = re.compile(r'<a name="?speech\d+"?><b>(.*?)</b></a>|<a name="?[\d.]+"?>(.*?)</a>', re.I | re.S)


@dataclass(frozen=True)
class Plays:
    """The pages `URL/PLAY/full.html` as one file, verified by the sha256 of its JSON, which covers all pages."""

    url: str
    plays: Sequence[str]
    sha256: str

    @property
    def label(self) -> str:
        """Host name of the source."""
        return urlsplit(self.url).netloc

    def fill(self, folder: Path, scratch: Path, *, progress: bool) -> None:
        """Download the plays one by one and write the lines of their characters."""
        texts: dict[str, str] = {}
        for play in self.plays:
            page = retrieve(f"{self.url}/{play}/full.html", None, scratch, progress=progress)
            texts |= by_character(play, page.read_text("latin-1"))
            page.unlink()
        data = json.dumps(texts).encode()
        if (got := hashlib.sha256(data).hexdigest()) != self.sha256:
            raise ValueError(f"SHA256 of the plays: expected {self.sha256} but got {got}")
        (folder / BY_CHARACTER).write_bytes(lzma.compress(data))


def by_character(play: str, page: str) -> Mapping[str, str]:
    """Return the lines of each character in order, under `PLAY_CHARACTER`, without stage directions."""
    lines: dict[str, list[str]] = {}
    character = None
    for speaker, line in _SPEAKER_OR_LINE.findall(page):
        if speaker:
            character = f"{play}_{speaker.strip().upper().replace(' ', '_')}"
        elif character is not None:
            lines.setdefault(character, []).append(line.strip())
    return {character: "\n".join(spoken) for character, spoken in lines.items()}
