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
@click.option("--list", "listing", is_flag=True, help="List the targets and their running times.")
@click.option(
    "--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Number of seeds per run: 0, 1, ..."
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help="Rounds of every run instead of its own number, for a quick test.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Simultaneous runs, one core each.  [default: all cores]")
@click.option(
    "--output",
    type=FOLDER,
    default=Path("runs/reproduce"),
    show_default=True,
    help="Folder for the runs, tables and plots.",
)
@click.option(
    "--results",
    type=FOLDER,
    default=Path("docs/results"),
    show_default=True,
    help="Folder with CSV files of finished runs, which studies of hundreds of runs do not repeat.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0),
    default=float("inf"),
    help="Seconds after which such a study stops and draws its finished runs; 0 runs nothing.",
)
def reproduce(
    name: str | None,
    *,
    listing: bool,
    seeds: int,
    rounds: int | None,
    jobs: int | None,
    output: Path,
    results: Path,
    time_limit: float,
) -> None:
    """Reproduce NAME, a table or figure of a paper, and compare it with the published numbers.

    Runs the experiments that NAME needs, several at a time, and prints a table with the number of the paper, the result
    here as mean and standard deviation over the seeds, the difference, and a verdict. The table is also written to
    OUTPUT/NAME.csv and OUTPUT/NAME.md, with a plot in OUTPUT/NAME.png. The runs are in OUTPUT/runs, and can be read
    with narrowcast compare and narrowcast ui.

    After an interruption, the same command resumes. Finished runs are not repeated, and targets share their runs.

    \b
    narrowcast reproduce --list                           list the targets
    narrowcast reproduce wireless-table1                  seconds, no training
    narrowcast reproduce colr-fig3 --rounds 50 --seeds 1  a quick look
    narrowcast reproduce colr-table4                      the full target, on all cores
    narrowcast reproduce decay-ml1m --time-limit 0        a study, from the results in the repository

    The exit status is 1 if a run failed, and does not depend on the verdicts.
    """  # noqa: D301 - click wants the character
    from narrowcast.reproduce.paper_results import TARGETS
    from narrowcast.reproduce.report import verdict_table
    from narrowcast.reproduce.study_targets import STUDY_TARGETS

    if listing:
        table = Table("name", "contents", "3 seeds on 2 cores", "source", box=None, pad_edge=False)
        for each, target in TARGETS.items():
            table.add_row(each, target.what, target.takes, target.source)
        for each, study in STUDY_TARGETS.items():
            table.add_row(each, study.what, study.takes, study.source)
        console().print(table)
        return
    if name is None:
        raise UserError(f"no table or figure given; name one of {', '.join(TARGETS)} (narrowcast reproduce --list)")
    from narrowcast.reproduce import reproduction

    words = ["narrowcast", "reproduce", name, "--seeds", str(seeds), "--output", str(output)]
    again = shlex.join(
        [*words, *(["--rounds", str(rounds)] if rounds else []), *(["--jobs", str(jobs)] if jobs else [])]
    )
    at_once = jobs or os.cpu_count() or 1
    try:
        if name in STUDY_TARGETS:
            if rounds is not None:
                raise UserError(f"{name} has rounds of its own; leave out --rounds")
            done = reproduction.draw_study(name, results=results, at_once=at_once, seconds=time_limit, output=output)
        else:
            done = reproduction.reproduce(name, seeds=seeds, rounds=rounds, at_once=at_once, output=output, say=_say)
    except RunFailed as error:
        raise RunFailed(f"{error} [{again}]") from error
    except KeyboardInterrupt:
        raise RunFailed(f"interrupted; resume with: {again}") from None
    console().print(verdict_table(done.title, done.verdicts))
    for line in (*done.notes, *map(str, done.files)):
        click.echo(line)


def _say(line: str) -> None:
    print(line, flush=True)
