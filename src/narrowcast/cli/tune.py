"""`narrowcast tune`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import click
from rich.table import Table

from narrowcast.cli.shared import FOLDER, TRUST, console, print_summaries, studies
from narrowcast.platform.config.trust import looking
from narrowcast.platform.errors import RunFailed

if TYPE_CHECKING:
    from narrowcast.runs.finished_run import TextTable
    from narrowcast.tuning.result import StudyResult
    from narrowcast.tuning.study_file import StudyFile


@click.command()
@click.argument("study", required=False, shell_complete=studies)
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@click.option("--dry-run", is_flag=True, help="Print the space, an estimate of the cost and a sampled configuration.")
@click.option("--backend", type=click.Choice(["local", "ray"]), help="Run trials in this process, or on Ray workers.")
@click.option("--address", metavar="HOST:PORT", help="A running Ray cluster to join (or auto); implies --backend ray.")
@click.option(
    "--storage",
    metavar="URL",
    envvar="NARROWCAST_STORAGE",
    help="A database, or a journal file that several machines can access; give passwords in NARROWCAST_STORAGE.",
)
@click.option("--name", help="Name of the study; a new name starts a new study.")
@click.option("--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs and studies.")
@TRUST
def tune(
    study: str | None, overrides: tuple[str, ...], *, dry_run: bool, output: Path, trust: bool, **given: str | None
) -> None:
    """Tune the settings of an experiment or a solve: STUDY is a YAML file, or the name of a packaged study.

    The file has three sections: the experiment or the solve, the study (objectives, sampler, pruner, trials) and the
    space. Without STUDY the packaged studies are listed. Any value of the first two can be set on the command line.

    \b
    narrowcast tune scolr-ml100k-rank-bits --dry-run           print the space and the estimated time
    narrowcast tune scolr-ml100k-rank-bits study.trials=20     with fewer trials
    narrowcast tune my-study.yaml study.parallel=4             with four workers on this machine
    narrowcast tune my-study.yaml --storage postgresql://host/studies   the same command on several machines

    The same command continues an interrupted or killed study. Trials are selected on validation; the best trials then
    run with new seeds and are measured on test. OUTPUT/NAME/best.yaml is a file for narrowcast run. A study runs the
    classes and programs that its file names; with --dry-run only those in folders that you trust (`narrowcast trust`).
    """  # noqa: D301 - click wants the character
    from narrowcast.cluster.resources import check_address_of
    from narrowcast.tuning.study_file import load_study, packaged_studies

    if study is None:
        print_summaries("study", packaged_studies())
        return
    paths = {"name": "name", "backend": "study.backend", "storage": "study.storage", "address": "study.address"}
    check_address_of(given["backend"], given["address"])
    own = [f"{path}={given[option]}" for option, path in paths.items() if given[option] is not None]
    if given["address"] is not None:
        own.append("study.backend=ray")
    if dry_run:
        with looking(Path(study).parent, trust=trust):
            _print_estimate(load_study(study, [*overrides, *own]))
        return
    file = load_study(study, [*overrides, *own])
    words = ["narrowcast", "tune", study, *overrides]
    for option in ("name", "backend", "address"):
        words += [f"--{option}", str(given[option])] if given[option] is not None else []
    again = shlex.join([*words, "--output", str(output)]) + (" --storage ..." if given["storage"] is not None else "")
    _run(file, output, again)


def _run(file: StudyFile, output: Path, again: str) -> None:
    from narrowcast.platform.config.files import command
    from narrowcast.tuning.display import StudyDisplay
    from narrowcast.tuning.study import prepare_study, run_study
    from narrowcast.tuning.trials import counts_towards_total

    prepared = prepare_study(file, output)
    if done := sum(counts_towards_total(trial) for trial in prepared.client.trials() if trial.state.is_finished()):
        click.echo(f"{file.name}: continuing after {done} trials")
    try:
        with StudyDisplay(file, prepared.client.n_trials, console()) as display:
            result = run_study(prepared, display)
    except KeyboardInterrupt:
        raise RunFailed(f"interrupted; continue with: {again}") from None
    _print_result(file, result)
    for path in result.files:
        click.echo(path)
    click.echo(f"MLflow  {prepared.store.shown}\n        look at it with: {command('ui', '--output', output)}")
    if result.best:
        click.echo(f"        run the best again with: {command('run', result.folder / 'best.yaml')}")


def _print_result(file: StudyFile, result: StudyResult) -> None:
    from narrowcast.platform.tracking.metrics import metric_label
    from narrowcast.platform.tracking.units import counted
    from narrowcast.tuning.result import format_params, format_value

    terminal, objectives = console(), file.settings.objectives
    several = len(objectives) > 1
    trials = result.front if several else result.best_trials
    title = f"Pareto front, {counted(len(trials), 'trial')}" if several else "Best trials"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for head in ("trial", *map(metric_label, objectives), "parameters"):
        table.add_column(head, no_wrap=head != "parameters")
    for trial in trials:
        mark = " *" if result.best is trial else ""
        reached = [format_value(name, trial.metrics[name], file.shares) for name in objectives]
        table.add_row(f"{trial.number}{mark}", *reached, format_params(trial.params))
    terminal.print(table)
    if several and trials:
        terminal.print("* chosen: the knee of the front", highlight=False)
    if result.elsewhere:
        click.echo(f"{result.elsewhere} trials are running in other processes; the last one evaluates on test")
    if result.holdout:
        terminal.print(f"Hold-out evaluation, {counted(len(result.holdout[0].seeds), 'new seed')}", highlight=False)
        for part in _holdout_table(result, [*objectives, *file.settings.constraints]).fitting(terminal.width):
            terminal.print(part)
    for caution in result.cautions:
        click.echo(caution)


def _holdout_table(result: StudyResult, judged: Sequence[str]) -> TextTable:
    """Return the hold-out evaluations: mean and standard deviation of the metrics over the seeds, and mean costs.

    The costs are the bits of a trial, and those that trials are judged by, objectives and constraints.
    """
    from narrowcast.platform.tracking.metrics import metric_label
    from narrowcast.runs.finished_run import Column, table_of, with_spread
    from narrowcast.tuning.result import format_value
    from narrowcast.tuning.settings import COSTS, final_costs, metric_names, trial_metrics

    held = result.holdout
    costs = final_costs(held[0].rows[0])
    costs |= {metric_label(name): name for name in judged if name in COSTS and name not in costs.values()}

    def cost(name: str) -> list[str]:
        return [format_value(name, fmean(trial_metrics(row)[name] for row in each.rows)) for each in held]

    return table_of(
        [
            Column("trial", [str(each.trial.number) for each in held]),
            *(
                Column(metric_label(name), [with_spread(name, *each.metric(name), result.shares) for each in held])
                for name in metric_names(held[0].rows[0])
            ),
            *(Column(head, cost(name)) for head, name in costs.items()),
        ]
    )


def _print_estimate(file: StudyFile) -> None:
    from narrowcast.platform.config.yaml import write_yaml
    from narrowcast.platform.tracking.units import counted, format_seconds
    from narrowcast.tuning.display import estimate
    from narrowcast.tuning.study import check_study

    shared = check_study(file)
    table = Table(
        "path", "values", "when", title=f"{file.name}: the space", title_justify="left", box=None, pad_edge=False
    )
    for path, dimension in file.space.dimensions.items():
        plain = dimension.model_dump(exclude={"kind", "when"}, exclude_defaults=True)
        values = (
            str(list(plain["values"]))
            if "values" in plain
            else ", ".join(f"{k} {v:g}" if k != "log" else k for k, v in plain.items())
        )
        table.add_row(path, values, ", ".join(f"{k} = {v}" for k, v in dimension.when.items()) or "always")
    console().print(table)
    cost, settings, step = estimate(file, shared), file.settings, file.subject.steps.removesuffix("s")
    on_test = f", then {format_seconds(cost.holdout_seconds)} on test" if cost.holdout_seconds else ""
    click.echo(
        f"\n{counted(cost.trials, 'trial')} x {counted(cost.steps, step)} x "
        f"{counted(settings.seeds, 'seed')}, {settings.workers} at a time: one "
        f"{step} takes {1000 * cost.step_seconds:.1f} ms here (up to "
        f"{1000 * cost.slowest_step_seconds:.1f}) and an "
        f"evaluation {1000 * cost.evaluation_seconds:.0f} ms, so about {format_seconds(cost.seconds)} without pruning"
        f"{on_test}"
    )
    click.echo("\n# a sampled configuration")
    write_yaml(file.run_with(cost.params).plain(), sys.stdout)
