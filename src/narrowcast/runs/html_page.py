"""The parts of an HTML page that stands alone: no network, and no script but one that its policy names by its hash."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from html import escape

from narrowcast.runs.terminal_output import plain

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
