"""Commands about kinds: `list`, `schema` and `check`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
from rich import box
from rich.table import Table
from rich.text import Text

from narrowcast.cli.shared import console
from narrowcast.platform.errors import RunFailed, UserError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from narrowcast.laws.law import Verdict
    from narrowcast.platform.config.kinds import Registry


@click.command()
@click.argument("spec", metavar="PACKAGE.MODULE:CLASS")
@click.argument("fields", nargs=-1, metavar="[FIELD=VALUE]...")
@click.option("--kind", metavar="REGISTRY", help="Kind of a class that extends no other of its kind: data, ...")
@click.option(
    "--data",
    metavar="DATA",
    help="Test a model, loss or metric on this data set: an experiment's, a kind, a file or a folder.",
)
def check(spec: str, fields: tuple[str, ...], kind: str | None, data: str | None) -> None:
    """Test a plugin class against the laws of its kind: placement, resumes, bits, budgets, pickling and YAML.

    \b
    narrowcast check my_methods:FedAvgM
    narrowcast check my_methods:FedAvgM momentum=0.5
    narrowcast check my_data:Sensors path=sensors.csv --kind data
    narrowcast check my_models:WideCNN --data mnist

    The module is searched for in the current directory and among installed packages. Built-in kinds, such as fedavg,
    can be tested too, with --kind. The exit status is 1 if a law fails.
    """  # noqa: D301 - click wants the character
    with closing(_in_a_fork(lambda: _tested(spec, fields, kind, data), spec)) as tested:
        click.echo(f"{spec}: {next(tested)}")
        reasons: list[str | None] = []
        for verdict in tested:
            assert not isinstance(verdict, str)
            says, remark = ("ok", "green"), verdict.note
            if verdict.reason is not None:
                says, remark = ("failed", "red"), "as above" if verdict.reason in reasons else verdict.reason
            reasons.append(verdict.reason)
            line = Text.assemble(f"  {verdict.law}: ", says, f": {remark}" if remark else "")
            console().print(line, highlight=False, soft_wrap=True)
    if failed := len(reasons) - reasons.count(None):
        raise RunFailed(f"{spec}: {failed} of {len(reasons)} laws do not hold")


def _registry_of(cls: object, spec: str) -> Registry:
    """Return the registry whose contract, or class of the catalog, a class extends; raise `UserError` without one."""
    from narrowcast.platform.config.catalog import REGISTRIES

    extended = [registry for registry in REGISTRIES.values() if registry.is_extended_by(cls)]
    if len(extended) != 1:
        raise UserError(f"{spec} extends no class that has a kind; say its own with --kind: {', '.join(REGISTRIES)}")
    return extended[0]


def _tested(spec: str, fields: Sequence[str], kind: str | None, data: str | None) -> Iterator[str | Verdict]:
    """Yield the name of the class's registry, then a verdict for each of its laws."""
    from narrowcast.laws.registries import verdicts
    from narrowcast.platform.config.catalog import REGISTRIES
    from narrowcast.platform.config.files import Defaults, apply_overrides, suggest, validate
    from narrowcast.platform.config.plugins import load
    from narrowcast.platform.data.soundness import load_checked
    from narrowcast.runs.data_section import data_source

    if kind is not None and kind not in REGISTRIES:
        raise UserError(f"--kind {kind}: known: {', '.join(REGISTRIES)}{suggest(kind, REGISTRIES)}")
    folders = [Path.cwd()]
    if kind is None and ":" not in spec:
        raise UserError(f"{spec}: say of what kind it is with --kind, or write package.module:Class")
    registry = _registry_of(load(spec, folders), spec) if kind is None else REGISTRIES[kind]
    resolved = registry.resolve(spec, folders)
    value = validate(resolved, apply_overrides({}, fields, Defaults(resolved, folders)), spec)
    loaded = None if data is None else load_checked(data_source(data, ()))
    yield registry.name
    yield from verdicts(registry, value, loaded)


_STOPS = (signal.SIGINT, signal.SIGTERM)
_STDERR = 2
_SECONDS_TO_END = 5.0


def _in_a_fork(tested: Callable[[], Iterator[str | Verdict]], spec: str) -> Generator[str | Verdict, None, None]:
    """Yield what a fork of this process yields; raise `RunFailed` if the class ends that.

    The fork ends with the generator, and says nothing of it. A process that has imported torch has threads, which a
    fork lacks, and tests by itself.
    """
    if "torch" in sys.modules:
        yield from tested()
        return
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(tested, sender))
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # until the fork has handlers of its own
    process.start()
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        sender.close()
        while (item := receiver.recv()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"by signal {-code}" if code < 0 else f"with exit status {code}, as os._exit does"
        law = "the law after the last one above"
        raise RunFailed(f"{spec}: it ended the process that tests it {how}, in {law}") from None
    finally:
        process.terminate()
        process.join(_SECONDS_TO_END)
        process.kill()  # a class may go on after an interrupt
        process.join()


def _send(tested: Callable[[], Iterator[str | Verdict]], sender: Connection) -> None:
    """Send what is yielded, and None after it or what is raised."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent, which gets it too, sends SIGTERM
    signal.signal(signal.SIGTERM, _end_in_silence)
    with suppress(BrokenPipeError, KeyboardInterrupt):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        try:
            for item in tested():
                sender.send(item)
            sender.send(None)
        except (UserError, RunFailed, ModuleNotFoundError, KeyboardInterrupt) as error:
            sender.send(error)


def _end_in_silence(*_: object) -> NoReturn:
    """Interrupt this process wherever it is, even as it shuts down, where Python would print a traceback."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), _STDERR)
    raise KeyboardInterrupt


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
    "topology": "kinds of algorithm.topology",
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
    from narrowcast.platform.config.catalog import REGISTRIES
    from narrowcast.platform.config.files import suggest

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
    from narrowcast.platform.config import plugins
    from narrowcast.platform.config.catalog import REGISTRIES

    if topic in REGISTRIES:
        registry = REGISTRIES[topic]
        yield from registry.summaries().items()
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


@click.command()
@click.argument("file", type=click.Choice(["experiment", "solve", "benchmark", "study"]), default="experiment")
def schema(file: str) -> None:
    """Print the JSON Schema of an experiment, solve, benchmark or study file, for editors that complete and check YAML.

    \b
    narrowcast schema > experiment.schema.json

    Then write this as the first line of an experiment file in the same folder:
    # yaml-language-server: $schema=experiment.schema.json
    """  # noqa: D301 - click wants the character
    from narrowcast.reference import file_schemas

    click.echo(json.dumps(getattr(file_schemas, f"{file}_schema")(), indent=2))
