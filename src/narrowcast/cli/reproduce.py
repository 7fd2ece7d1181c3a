"""`narrowcast reproduce`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click
from rich.table import Table

from narrowcast.cli.terminal import FOLDER, console
from narrowcast.platform.errors import RunFailed, UserError


@click.command()
@click.argument("name", required=False)
@click.option("--list", "listing", is_flag=True, help="What can be reproduced, and how long it takes.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Seeds 0, 1, ... of each run.")
@click.option("--rounds", type=click.IntRange(min=1), help="Cut every run short, for a quick look.")
@click.option("--jobs", type=click.IntRange(min=1), help="Runs at a time, one core each; all cores by default.")
@click.option("--output", type=FOLDER, default=Path("runs/reproduce"), show_default=True, help="Folder of it all.")
def reproduce(
    name: str | None, *, listing: bool, seeds: int, rounds: int | None, jobs: int | None, output: Path
) -> None:
    """Reproduce NAME, a table or figure of a paper, and set its numbers beside ours.

    Plays the runs that it needs, several at a time, and ends in a table: the paper's number, ours as mean and standard
    deviation over the seeds, the difference, and whether that counts as reproduced. The same goes to OUTPUT/NAME.csv
    and NAME.md, with a plot in NAME.png. The runs stand in OUTPUT/runs and are ordinary ones (narrowcast compare, ui).

    Interrupt it when you like: the same command goes on. What is finished is not run again, and targets share runs.

    \b
    narrowcast reproduce --list                           what there is
    narrowcast reproduce wireless-table1                  seconds, no training
    narrowcast reproduce colr-fig3 --rounds 50 --seeds 1  a quick look at the machinery
    narrowcast reproduce colr-table4                      the real thing, on all cores

    The exit status is 0 whatever the verdicts, 1 where a run failed.
    """  # noqa: D301 - click wants the character
    from narrowcast.reproduce.paper_results import TARGETS
    from narrowcast.reproduce.report import verdict_table

    if listing:
        table = Table("name", "what it is", "3 seeds on 2 cores", "source", box=None, pad_edge=False)
        for each, target in TARGETS.items():
            table.add_row(each, target.what, target.takes, target.source)
        console().print(table)
        return
    if name is None:
        raise UserError(f"nothing to reproduce; name one of {', '.join(TARGETS)} (narrowcast reproduce --list)")
    from narrowcast.reproduce import reproduction

    words = ["narrowcast", "reproduce", name, "--seeds", str(seeds), "--output", str(output)]
    again = shlex.join(
        [*words, *(["--rounds", str(rounds)] if rounds else []), *(["--jobs", str(jobs)] if jobs else [])]
    )
    try:
        done = reproduction.reproduce(
            name, seeds=seeds, rounds=rounds, at_once=jobs or os.cpu_count() or 1, output=output, say=_say
        )
    except RunFailed as error:
        raise RunFailed(f"{error} [{again}]") from error
    except KeyboardInterrupt:
        raise RunFailed(f"interrupted; go on with: {again}") from None
    console().print(verdict_table(done.title, done.verdicts))
    for line in (*done.notes, *map(str, done.files)):
        click.echo(line)


def _say(line: str) -> None:
    print(line, flush=True)
