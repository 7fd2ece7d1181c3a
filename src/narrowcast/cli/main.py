"""The command line: its commands, their exit statuses, and the formats of its log."""

from __future__ import annotations

import atexit
import json
import logging
import signal
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn, TextIO, cast

import click

from narrowcast._version import __version__
from narrowcast.cli.cluster import doctor, jobs, manifest, submit
from narrowcast.cli.compare import compare, report, site, ui
from narrowcast.cli.data import data, keys
from narrowcast.cli.kinds import check, list_kinds, schema
from narrowcast.cli.many_runs import benchmark, reproduce, tune
from narrowcast.cli.run import export, run, show, sync, trust, verify
from narrowcast.cli.shared import complain
from narrowcast.platform.config.plugins import EXTRA_OF, missing_extra_message, said
from narrowcast.platform.config.redaction import redact, redact_values
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.storage.host import STOPPING
from narrowcast.runs.terminal_output import OutputUntilClosed, discard_unread, open_missing_streams, plain

_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object per record: time, level, logger, message, and its extra fields (run, round, clients)."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        extra = {name: value for name, value in vars(record).items() if name not in _USUAL and name[0] != "_"}
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **extra,
        }
        return json.dumps(redact_values(line), default=lambda value: redact(str(value)))


class Text(logging.Formatter):
    """Level and message of a record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record, with the traceback that it may have."""
        return plain(redact(super().format(record)))


def write_log(*, as_json: bool) -> None:
    """Log warnings as text, or everything as JSON with one record per round."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLines() if as_json else Text("%(levelname)s: %(message)s"))
    logging.getLogger("narrowcast").setLevel(logging.INFO if as_json else logging.WARNING)


class _Commands(click.Group):
    """Commands in the order in which a new user needs them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Call the command; raise `RunFailed` for an interrupt, before which click would print an empty line.

        A second interrupt, while the command ends, leaves what the command was about to say of the first one.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            earlier = error.__context__
            while earlier is not None and not isinstance(earlier, RunFailed):
                earlier = earlier.__context__
            raise earlier or RunFailed("interrupted") from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    envvar="NARROWCAST_LOG_FORMAT",
    help="Format of the log on stderr: warnings as text, or JSON with one record per round.",
)
def cli(log_format: str) -> None:
    """Communication-constrained federated learning: accuracy against bits and time.

    \b
    narrowcast run scolr-ml100k                       run the demo, a packaged experiment
    narrowcast run scolr-ml100k algorithm.rank=16     run it with another rank
    narrowcast run my.yaml --backend local            run your own file, without Ray
    narrowcast tune fedmf-ml1m-rates                  tune an experiment's hyperparameters
    narrowcast benchmark completion-65                solve 65 problems with eleven solvers
    narrowcast compare runs/a runs/b                  compare runs in a table and a plot
    narrowcast report runs/a runs/b                   compare runs in one HTML file
    narrowcast site                                   compare solves in static pages
    narrowcast verify scolr-ml100k                    check its files and model, and repeat rounds
    narrowcast export scolr-ml100k                    write the trained model to a file
    narrowcast reproduce colr-table4                  reproduce the table of a paper
    narrowcast submit my.yaml --address http://HEAD:8265   run on a Ray cluster
    narrowcast ui                                     open all runs in the MLflow UI

    From Python: import narrowcast as nc; nc.run("scolr-ml100k").
    """  # noqa: D301 - click wants the character
    write_log(as_json=log_format == "json")


_SUBCOMMANDS = (
    *(run, show, list_kinds, schema, check, tune, benchmark, compare, report, site, verify, export, reproduce),
    *(submit, jobs, manifest, doctor, data, keys, ui, sync, trust),
)
for command in _SUBCOMMANDS:
    cli.add_command(command)


def main() -> NoReturn:
    """Run the command line and exit with 0, 1 for a failed run, 2 for bad input, without a traceback."""
    open_missing_streams()
    logging.basicConfig()
    STOPPING.clear()
    sys.stdout = cast(TextIO, OutputUntilClosed(sys.stdout))
    atexit.register(discard_unread)
    signal.signal(signal.SIGTERM, _stop)
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == default:  # background jobs and nohup ignore them
            signal.signal(number, _stop)
    try:
        status = cli(prog_name="narrowcast", standalone_mode=False)
    except UserError as error:
        _fail(str(error), 2)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        _fail(" ".join(error.format_message().split()), 2)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRA_OF:
            raise
        _fail(missing_extra_message(library, "this command"), 2)
    except RunFailed as error:
        _fail(str(error), 1)
    except SystemExit as error:
        _fail(f"a module ended the command, by {said(error)}; let it raise an exception", 1)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", 1)
    sys.exit(status or 0)


def _stop(*_: object) -> NoReturn:
    STOPPING.set()
    signal.alarm(0)  # Ray's own handler may have armed one that aborts the process
    raise KeyboardInterrupt


def _fail(message: str, status: int) -> NoReturn:
    if STOPPING.is_set():  # a second interrupt would end Python by the signal while it shuts down
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        exec("")  # so would an interrupted exec, as in a dataclass, though it is handled; the last one counts
    with suppress(OSError):  # the terminal may be closed
        complain(message)
    sys.exit(status)


if __name__ == "__main__":
    main()
