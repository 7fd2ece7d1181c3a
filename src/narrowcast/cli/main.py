"""The command line: its commands, and how each ends."""

from __future__ import annotations

import logging
import signal
import sys
from typing import NoReturn

import click

from narrowcast import __version__
from narrowcast.cli.compare import compare
from narrowcast.cli.data import data
from narrowcast.cli.doctor import doctor
from narrowcast.cli.jobs import jobs
from narrowcast.cli.keys import keys
from narrowcast.cli.log_format import write_log
from narrowcast.cli.manifest import manifest
from narrowcast.cli.reproduce import reproduce
from narrowcast.cli.run import run
from narrowcast.cli.show import show
from narrowcast.cli.submit import submit
from narrowcast.cli.sync import sync
from narrowcast.cli.tune import tune
from narrowcast.cli.ui import ui
from narrowcast.platform.errors import RunFailed, UserError
from narrowcast.platform.interruption import STOPPING


class _Commands(click.Group):
    """Commands in the order in which a newcomer needs them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self.commands)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    envvar="NARROWCAST_LOG_FORMAT",
    help="Log lines on stderr: warnings for people, or JSON with a record a round (also NARROWCAST_LOG_FORMAT).",
)
def cli(log_format: str) -> None:
    """Federated learning over narrow links: accuracy against bits and time.

    \b
    narrowcast run scolr-ml100k                       the demo, a packaged experiment
    narrowcast run scolr-ml100k algorithm.rank=16     with another rank
    narrowcast run my.yaml --backend local           your own file, without Ray
    narrowcast tune fedmf-ml1m-rates                a study: which values serve best
    narrowcast compare runs/a runs/b                  a table and a plot of several runs
    narrowcast reproduce colr-table4                  a paper's table, its numbers beside ours
    narrowcast submit my.yaml --address http://HEAD:8265   on a Ray cluster
    narrowcast ui                                     all runs in the MLflow UI
    """  # noqa: D301 - click wants the character
    write_log(as_json=log_format == "json")


for command in (run, show, tune, compare, reproduce, submit, jobs, manifest, doctor, data, keys, ui, sync):
    cli.add_command(command)


def main() -> NoReturn:
    """Run the command line: status 0, 1 for a failed run, 2 for bad input, always without a traceback."""
    logging.basicConfig()
    STOPPING.clear()
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    try:
        status = cli(prog_name="narrowcast", standalone_mode=False)
    except UserError as error:
        _fail(str(error), 2)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except RunFailed as error:
        _fail(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", 1)
    sys.exit(status or 0)


def _stop(*_: object) -> NoReturn:
    STOPPING.set()
    signal.alarm(0)  # Ray's own handler may have armed one that aborts the process
    raise KeyboardInterrupt


def _fail(message: str, status: int) -> NoReturn:
    click.echo(f"narrowcast: {message}", err=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
