"""`narrowcast list`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

import click
from rich import box
from rich.table import Table

from narrowcast.cli.terminal import console
from narrowcast.platform.errors import UserError

_FILES = {
    "experiment": "packaged experiments: narrowcast run NAME",
    "solve": "packaged solves: narrowcast run NAME",
    "benchmark": "packaged benchmarks of solvers: narrowcast benchmark NAME",
    "study": "packaged studies: narrowcast tune NAME",
    "target": "tables and figures of papers: narrowcast reproduce NAME",
}
_REGISTRIES = {
    "sampler": "kinds of study.sampler",
    "pruner": "kinds of study.pruner",
    "codec": "stages of a codec, such as algorithm.codec",
    "partition": "kinds of data.partition",
    "channel": "kinds of radio.channel",
    "downlink": "kinds of radio.downlink",
    "allocation": "kinds of radio.allocation",
    "loss": "kinds of model.loss",
    "metric": "kinds of model.metrics",
    "learning_rate_schedule": "kinds of training.learning_rate_schedule",
    "server_optimizer": "kinds of algorithm.server_optimizer",
    "aggregator": "kinds of algorithm.aggregator",
    "rank_policy": "kinds of algorithm.rank_policy",
}
"""By registry, the fields that take its kinds, if they are not the field of its own name."""


@click.command("list")
@click.argument("topic", required=False)
def list_kinds(topic: str | None) -> None:
    """List experiments, studies, data sets, algorithms, codecs, channels, ..., with one line each.

    \b
    narrowcast list             everything
    narrowcast list codec       the stages of codecs
    narrowcast list data        the data sets

    The headings name the section of a file, or of an override, to which the kinds belong: fleet=lognormal. Kinds of
    installed plugins are listed too. narrowcast show EXPERIMENT prints an experiment with all of its values.
    """  # noqa: D301 - click wants the character
    from narrowcast.platform.config import suggest
    from narrowcast.registry import REGISTRIES

    topics = [*_FILES, *REGISTRIES]
    if topic is not None and topic.removesuffix("s") in topics:
        topic = topic.removesuffix("s")
    if topic is not None and topic not in topics:
        raise UserError(f'nothing is listed under "{topic}"; known: {", ".join(topics)}{suggest(topic, topics)}')
    terminal = console()
    for name in topics if topic is None else [topic]:
        heading = _FILES.get(name) or _REGISTRIES.get(name) or f"kinds of {name}"
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        table.add_column(name, no_wrap=True)
        table.add_column(heading)
        for kind, summary in sorted(_entries(name)) if name in _FILES else _entries(name):
            table.add_row(kind, summary)
        terminal.print(table, "")


def _entries(topic: str) -> Iterator[tuple[str, str]]:
    """Yield each name under a topic with one line about it."""
    from narrowcast.platform import plugins
    from narrowcast.registry import REGISTRIES

    if topic in REGISTRIES:
        registry = REGISTRIES[topic]
        yield from ((kind, _first_line(found)) for kind, found in registry.items())
        yield from ((kind, f"plugin {spec}") for kind, spec in plugins.entry_points(topic).items())
    else:
        yield from _named(topic).items()


def _named(topic: str) -> Mapping[str, str]:
    if topic == "target":
        from narrowcast.studies.targets import find_targets

        return {name: target.fields.what for name, target in find_targets().items()}
    from narrowcast.packaged import BENCHMARKS, EXPERIMENTS, SOLVES, STUDIES, summaries

    folders = {"experiment": EXPERIMENTS, "solve": SOLVES, "benchmark": BENCHMARKS, "study": STUDIES}
    return summaries(folders[topic])


def _first_line(found: type) -> str:
    return (inspect.getdoc(found) or "").partition("\n\n")[0].replace("\n", " ")
