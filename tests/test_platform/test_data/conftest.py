from pathlib import Path

import pytest

from narrowcast.platform.data import download


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where data is looked for."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(download.VARIABLE, str(tmp_path))
    return tmp_path
