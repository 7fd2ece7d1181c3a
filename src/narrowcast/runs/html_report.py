"""The parts of an HTML page that stands alone: no network, and no script but one that its policy names by its hash."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from narrowcast.platform.config.trust import own_file
from narrowcast.platform.config.yaml import read_limited
from narrowcast.platform.errors import UserError
from narrowcast.platform.storage.disk import write_atomically
from narrowcast.runs.folder import CONFIG
from narrowcast.runs.terminal_output import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.2rem; margin-top: 2rem; }}
table {{ border-collapse: collapse; margin: .5rem 0; display: block; overflow-x: auto; }}
th, td {{ padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; }}
thead th {{ border-bottom: 1px solid #888; white-space: pre-line; vertical-align: bottom; }}
tbody tr + tr td {{ border-top: 1px solid #eee; }}
.number {{ text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; color: #555; caption-side: bottom; }}
img {{ max-width: min(100%, 62rem); }} figure {{ margin: 1rem 0; }}
pre {{ background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: 13px; }}
summary {{ cursor: pointer; }}
{style}</style>
</head>
<body>
<h1>{title}</h1>
"""


def html_page(title: str, parts: Iterable[str], *, style: str = "", script: str = "") -> str:
    """Return a page; `parts` are HTML, `style` and `script` are appended as they are."""
    policy, run = "default-src 'none'; img-src data:; style-src 'unsafe-inline'", ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy, run = f"{policy}; script-src 'sha256-{digest}'", f"<script>{script}</script>\n"
    head = _HEAD.format(title=escape(title), style=style, policy=policy)
    return plain(head + "\n".join(parts)) + f"\n{run}</body>\n</html>\n"


def section(title: str, content: str) -> str:
    """Return a section with a heading; `content` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of labels and values."""
    body = "".join(f"<tr><td>{escape(label)}</td><td>{escape(value)}</td></tr>" for label, value in rows)
    return f"<table><tbody>{body}</tbody></table>"


_DPI = 110


def write_report(page: str, path: str | Path) -> Path:
    """Write a report to an `.html` file and return its path."""
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{path}: not the name of a page; end it in .html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page.encode())
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); give another file") from error
    return path


def configuration(folder: Path) -> str:
    """Return the content of a run's `config.yaml`, folded up; nothing if it is missing."""
    path = own_file(folder, CONFIG)
    if not path.is_file():
        return ""
    text = escape(read_limited(path))
    return f"<details><summary>Configuration of {escape(folder.name)}</summary><pre>{text}</pre></details>"


def image(figure: Figure, description: str) -> str:
    """Return a figure of Matplotlib as part of a page."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DPI)
    return picture(content.getvalue(), description)


def picture(png: bytes, description: str) -> str:
    """Return a PNG file as part of a page."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<figure><img alt="{escape(description)}" src="{source}"></figure>'
