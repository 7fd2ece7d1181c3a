"""`narrowcast reproduce`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click
from rich.table import Table

from narrowcast.cli.shared import FOLDER, console
from narrowcast.platform.errors import RunFailed, UserError


@click.command()
@click.argument("name", required=False)
@click.option("--list", "listing", is_flag=True, help="List the targets and their running times; no code runs.")
@click.option(
    "--papers",
    type=FOLDER,
    help="Folder of papers, or of one paper.  [default: ./papers and the installed ones]",
)
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
    help="Folder with CSV files of finished runs, which studies do not repeat.  [default: the paper's]",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0),
    default=float("inf"),
    help="Seconds after which such a study stops and draws its finished runs; 0 runs nothing.",
)
@click.option("--keep", is_flag=True, help="Add the rows of such a study to its CSV files in the folder of results.")
def reproduce(
    name: str | None,
    *,
    listing: bool,
    papers: Path | None,
    seeds: int,
    rounds: int | None,
    jobs: int | None,
    output: Path,
    results: Path | None,
    time_limit: float,
    keep: bool,
) -> None:
    """Reproduce NAME, a table or figure of a paper, and compare it with the published numbers.

    Runs the experiments that NAME needs, several at a time, and prints a table with the number of the paper, the result
    here as mean and standard deviation over the seeds, the difference, and a verdict. The table is also written to
    OUTPUT/NAME.csv and OUTPUT/NAME.md, with a plot in OUTPUT/NAME.png. The runs are in OUTPUT/runs, and can be read
    with narrowcast compare and narrowcast ui.

    Papers are folders with a targets.yaml: those in ./papers, in the folder of --papers, and those of installed
    packages such as narrowcast-papers. After an interruption, the same command resumes. Finished runs are not
    repeated, and targets share their runs.

    \b
    narrowcast reproduce --list                           list the targets
    narrowcast reproduce wireless-table1                  seconds, no training
    narrowcast reproduce colr-fig3 --rounds 50 --seeds 1  a quick look
    narrowcast reproduce colr-table4                      the full target, on all cores
    narrowcast reproduce decay-ml1m --time-limit 0        a study, from the results in its paper's folder

    The exit status is 1 if a run failed, and does not depend on the verdicts.
    """  # noqa: D301 - click wants the character
    from narrowcast.studies.targets import check_any, find_target, find_targets

    targets = find_targets(papers)
    if listing:
        check_any(targets)
        table = Table("name", "contents", "3 seeds on 2 cores", "source", box=None, pad_edge=False)
        for target in targets.values():
            table.add_row(target.name, target.fields.what, target.fields.takes, target.source)
        console().print(table)
        return
    if name is None:
        check_any(targets)
        raise UserError(f"no table or figure given; name one of {', '.join(targets)} (narrowcast reproduce --list)")
    target = find_target(name, targets)
    from narrowcast.studies.reproduction import Effort, draw_study, run_recorded
    from narrowcast.studies.tables import RecordedTable
    from narrowcast.studies.verdicts import verdict_table

    words = ["narrowcast", "reproduce", name, *(["--papers", str(papers)] if papers else [])]
    words += ["--seeds", str(seeds), "--output", str(output)]
    again = shlex.join(
        [*words, *(["--rounds", str(rounds)] if rounds else []), *(["--jobs", str(jobs)] if jobs else [])]
    )
    effort = Effort(seeds, rounds, jobs or os.cpu_count() or 1, time_limit)
    try:
        table_of = target.table()
        if isinstance(table_of, RecordedTable):
            done = run_recorded(target, table_of, effort, output=output, say=_say)
        else:
            done = draw_study(target, table_of, effort, results=results or target.results, output=output)
            if keep:
                table_of.keep(output, results or target.results)
    except RunFailed as error:
        raise RunFailed(f"{error} [{again}]") from error
    except KeyboardInterrupt:
        raise RunFailed(f"interrupted; resume with: {again}") from None
    console().print(verdict_table(done.title, done.verdicts))
    for line in (*done.notes, *map(str, done.files)):
        click.echo(line)


def _say(line: str) -> None:
    print(line, flush=True)
