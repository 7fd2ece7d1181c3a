"""`narrowcast tune`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from narrowcast.cli.terminal import FOLDER, console
from narrowcast.platform.errors import RunFailed

if TYPE_CHECKING:
    from narrowcast.tuning.holdout import Retested
    from narrowcast.tuning.study_file import StudyFile
    from narrowcast.tuning.study_result import StudyResult


@click.command()
@click.argument("study", required=False)
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@click.option("--dry-run", is_flag=True, help="Print the space, what it would cost and a drawn configuration, and end.")
@click.option("--backend", type=click.Choice(["local", "ray"]), help="Play trials in this process, or on Ray workers.")
@click.option("--address", metavar="HOST:PORT", help="A running Ray cluster to join (or auto); implies --backend ray.")
@click.option("--storage", metavar="URL", help="A database, or a journal file that several machines can reach.")
@click.option("--name", help="The study's name: another one begins another study.")
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs and studies.")
def tune(
    study: str | None,
    overrides: tuple[str, ...],
    *,
    dry_run: bool,
    backend: str | None,
    address: str | None,
    storage: str | None,
    name: str | None,
    output: Path,
) -> None:
    """Look for good values of an experiment: STUDY is a YAML file, or the name of a packaged study.

    The file has three sections: the experiment, the study (objectives, sampler, pruner, trials) and the space. Without
    STUDY the packaged studies are listed. Any value of the first two can be set on the command line.

    \b
    narrowcast tune scolr-ml100k-rank-bits --dry-run           what it would do, and how long it would take
    narrowcast tune scolr-ml100k-rank-bits study.trials=20     a shorter one
    narrowcast tune my-study.yaml study.parallel=4             four workers on this machine's Ray
    narrowcast tune my-study.yaml --storage postgresql://host/studies   on several machines, the same command on each

    Interrupt it when you like, or kill it: the same command goes on. Trials are chosen on validation; the best ones are
    then played with new seeds and measured on test. OUTPUT/NAME/best.yaml is an experiment that narrowcast run takes.
    """  # noqa: D301 - click wants the character
    from narrowcast.tuning.study_file import load_study, packaged_studies

    if study is None:
        table = Table("study", "what it is", box=None, pad_edge=False)
        for each, summary in packaged_studies().items():
            table.add_row(each, summary)
        console().print(table)
        return
    given = [("name", name), ("study.backend", backend), ("study.storage", storage), ("study.address", address)]
    own = [f"{path}={value}" for path, value in given if value is not None]
    if address is not None:
        own.append("study.backend=ray")
    if backend == "local":
        own.append("study.parallel=1")
    file = load_study(study, [*overrides, *own])
    if dry_run:
        _dry_run(file)
        return
    options = [("--name", name), ("--backend", backend), ("--address", address), ("--output", str(output))]
    words = [study, *overrides, *(word for option, value in options if value is not None for word in (option, value))]
    again = shlex.join(["narrowcast", "tune", *words]) + (" --storage ..." if storage is not None else "")
    _play(file, output, again)


def _play(file: StudyFile, output: Path, again: str) -> None:
    from narrowcast.tuning import dispatch as sweep
    from narrowcast.tuning.study_progress import StudyProgress
    from narrowcast.tuning.trial_attributes import counts

    prepared = sweep.prepare_study(file, output)
    terminal = console()
    if done := sum(counts(trial) for trial in prepared.ledger.trials() if trial.state.is_finished()):
        click.echo(f"{file.name}: going on after {done} trials")
    try:
        with StudyProgress(file.name, file.settings.objectives, prepared.ledger.n_trials, terminal) as progress:
            result = sweep.run_study(prepared, progress)
    except KeyboardInterrupt:
        raise RunFailed(f"interrupted; go on with: {again}") from None
    _report(file, result)
    from narrowcast.platform.tracking.store_address import hide_password

    for path in result.files:
        click.echo(path)
    click.echo(f"MLflow  {hide_password(prepared.uri)}\n        look at it with: narrowcast ui --output {output}")
    if result.best:
        click.echo(f"        run the best again with: narrowcast run {prepared.folder / 'best.yaml'}")


def _report(file: StudyFile, result: StudyResult) -> None:
    from narrowcast.tuning.study_progress import settings_line, shown

    terminal, objectives = console(), file.settings.objectives
    several = len(objectives) > 1
    rows = result.front if several else result.best
    title = f"Pareto front, {len(rows)} trials" if several else "Best trials"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for head in ("trial", *objectives, "values"):
        table.add_column(head, no_wrap=head != "values")
    for row in rows:
        mark = " *" if result.best and row.number == result.best[0].number else ""
        reached = [shown(name, row.amounts[name]) for name in objectives]
        table.add_row(f"{row.number}{mark}", *reached, settings_line(row.drawn))
    terminal.print(table)
    if several and rows:
        terminal.print("* chosen: the knee of the front", highlight=False)
    if result.elsewhere:
        click.echo(f"{result.elsewhere} trials are still played by other processes; the last one measures on test")
    if result.tested:
        terminal.print(_test_table(result.tested))


def _test_table(tested: Sequence[Retested]) -> Table:
    """The best trials with new seeds: mean and standard deviation, validation beside test."""
    from narrowcast.platform.tracking.units import format_bits

    seeds = len(tested[0].seeds)
    table = Table(title=f"Played again with {seeds} new seeds", title_justify="left", box=None, pad_edge=False)
    names = [name for name in tested[0].rows[0] if name.startswith(("validation.", "test."))]
    for head in ("trial", *(f"{name} (%)" for name in names), "uplink"):
        table.add_column(head, justify="right")
    for each in tested:
        cells = []
        for name in names:
            mean, spread = (100 * value for value in each.metric(name))
            cells.append(f"{mean:.2f} ± {spread:.2f}" if seeds > 1 else f"{mean:.2f}")
        table.add_row(str(each.trial.number), *cells, format_bits(each.metric("total_uplink_bits")[0]))
    return table


def _dry_run(file: StudyFile) -> None:
    import sys

    from narrowcast.platform.config import write_yaml
    from narrowcast.platform.tracking.units import format_seconds
    from narrowcast.tuning import dispatch as sweep
    from narrowcast.tuning.dry_run import estimate

    shared = sweep.check_study(file)
    table = Table(
        "path", "values", "when", title=f"{file.name}: the space", title_justify="left", box=None, pad_edge=False
    )
    for path, dimension in file.space.dimensions.items():
        plain = dimension.model_dump(exclude={"kind", "when"}, exclude_defaults=True)
        said = (
            str(list(plain["values"]))
            if "values" in plain
            else ", ".join(f"{k} {v:g}" if k != "log" else k for k, v in plain.items())
        )
        table.add_row(path, said, ", ".join(f"{k} = {v}" for k, v in dimension.when.items()) or "always")
    console().print(table)
    cost = estimate(file, shared)
    settings, trials = file.settings, cost.trials
    tested = f", and then {format_seconds(cost.retest_seconds)} on test" if cost.retest_seconds else ""
    click.echo(
        f"\n{trials} trials x {cost.rounds} rounds x {settings.seeds} seeds, {settings.parallel} at a time: a round "
        f"takes {1000 * cost.round_seconds:.1f} ms here (up to {1000 * cost.dearest_round_seconds:.1f}) and an "
        f"evaluation {1000 * cost.evaluation_seconds:.0f} ms, so about {format_seconds(cost.seconds)} where nothing is "
        f"pruned{tested}"
    )
    click.echo("\n# a drawn configuration")
    write_yaml(file.whole(cost.drawn).plain(), sys.stdout)
