"""The report of a run or of a comparison: one HTML file with its figures inside, without scripts or links."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowcast.platform.atomic_files import write_atomically
from narrowcast.platform.errors import UserError
from narrowcast.platform.yaml_limits import read_limited
from narrowcast.runs.finished_run import FinishedRun
from narrowcast.runs.run_folder import CONFIG

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from narrowcast.runs.run_comparison import RunComparison

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
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
</style>
</head>
<body>
<h1>{title}</h1>
"""
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


def run_report(result: FinishedRun[Any]) -> str:
    """Return the page of a run: metrics and costs, figures, the partition of the data, and the configuration."""
    parts = [
        f"<p>{escape(result.heading)}</p>",
        _section("Results", _pairs(result.summary())),
        *(_section(_title(name), _image(figure, _title(name))) for name, figure in result.figures().items()),
    ]
    partition = result.folder / "partition" / "partition.png"
    if partition.is_file():
        parts.append(_section("Data of the clients", _picture(partition.read_bytes(), "data of the clients")))
    parts += [_section("Provenance", _pairs(result.provenance())), _configuration(result)]
    return _page(f"Run {result.name}", parts)


def comparison_report(comparison: RunComparison[Any]) -> str:
    """Return the page of a comparison: settings that differ, tables, the figure, and each run's configuration."""
    made = comparison.text_tables()
    shown = [_section(title, table.html()) for title, table in made.items()]
    figure = _section("Metrics and costs", _image(comparison.figure(), "metrics against costs, a line per run"))
    shown.insert(1 + list(made).index("Results"), figure)
    if (of_clients := comparison.clients_figure()) is not None:
        shown.append(_section("Distribution over clients", _image(of_clients, "metric by percentile of the clients")))
    runs = [
        f"<details><summary>{escape(label)}</summary>{_pairs(run.summary())}{_pairs(run.provenance())}"
        f"{_configuration(run)}</details>"
        for label, run in zip(comparison.labels(), comparison.runs, strict=True)
    ]
    names = ", ".join(comparison.row_labels())
    return _page(f"Comparison of {names}", [*shown, _section("Runs", "".join(runs))])


def _configuration(result: FinishedRun[Any]) -> str:
    path = result.folder / CONFIG
    if not path.is_file():
        return ""
    text = escape(read_limited(path))
    return f"<details><summary>Configuration of {escape(result.name)}</summary><pre>{text}</pre></details>"


def _page(title: str, parts: Iterable[str]) -> str:
    return _HEAD.format(title=escape(title)) + "\n".join(parts) + "\n</body>\n</html>\n"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _title(figure: str) -> str:
    """Return the heading of one of a run's figures by its name."""
    return {
        "accuracy_round": "Test metrics by round",
        "accuracy_uplink": "Test metrics against uplink",
        "accuracy_total": "Test metrics against total traffic",
        "accuracy_time": "Test metrics against simulated time",
        "client_bits_ranks": "Uplink of the clients",
        "loss_time": "Training loss",
        "client_metrics": "Metrics of the clients",
        "error_iteration": "Metrics by iteration",
        "error_time": "Metrics against the time of the solver",
    }[figure]


def _pairs(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f"<tr><td>{escape(label)}</td><td>{escape(value)}</td></tr>" for label, value in rows)
    return f"<table><tbody>{body}</tbody></table>"


def _image(figure: Figure, description: str) -> str:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DPI)
    return _picture(content.getvalue(), description)


def _picture(png: bytes, description: str) -> str:
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<figure><img alt="{escape(description)}" src="{source}"></figure>'
