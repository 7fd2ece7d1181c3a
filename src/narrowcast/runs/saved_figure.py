"""Writing a figure to a file in the format that its suffix names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from narrowcast.platform.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def saved_figure(figure: Figure, path: str | Path | None) -> Figure:
    """Write the figure to a file if a path is given, and return it."""
    if path is not None:
        path = Path(path)
        known = sorted(figure.canvas.get_supported_filetypes())
        if path.suffix.removeprefix(".").lower() not in known:
            raise UserError(f"{path}: not the name of a figure; end it in one of .{', .'.join(known)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure
