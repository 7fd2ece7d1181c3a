"""Commands that start many runs: `tune`, `benchmark` and `reproduce`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import click
from rich.table import Table

from narrowcast.cli.shared import FOLDER, TRUST, benchmarks, complain, console, print_summaries, studies
from narrowcast.platform.config.trust import looking
from narrowcast.platform.errors import RunFailed, UserError

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
    from narrowcast.cluster.decisions import check_address_of
    from narrowcast.tuning.study_file import load_study, packaged_studies

    if study is None:
        print_summaries("study", packaged_studies())
        return
    paths = {"name": "name", "backend": "study.backend", "storage": "study.storage", "address": "study.address"}
    check_address_of(given["backend"], given["address"])
    by_options = [f"{path}={given[option]}" for option, path in paths.items() if given[option] is not None]
    if given["address"] is not None:
        by_options.append("study.backend=ray")
    if dry_run:
        with looking(Path(study).parent, trust=trust):
            _print_estimate(load_study(study, [*overrides, *by_options]))
        return
    file = load_study(study, [*overrides, *by_options])
    words = ["narrowcast", "tune", study, *overrides]
    for option in ("name", "backend", "address"):
        words += [f"--{option}", str(given[option])] if given[option] is not None else []
    same_command = shlex.join([*words, "--output", str(output)]) + (
        " --storage ..." if given["storage"] is not None else ""
    )
    _run(file, output, same_command)


def _run(file: StudyFile, output: Path, same_command: str) -> None:
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
        raise RunFailed(f"interrupted; continue with: {same_command}") from None
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
        return [format_value(name, fmean(trial_metrics(row)[name] for row in evaluation.rows)) for evaluation in held]

    return table_of(
        [
            Column("trial", [str(evaluation.trial.number) for evaluation in held]),
            *(
                Column(
                    metric_label(name),
                    [with_spread(name, *evaluation.metric(name), result.shares) for evaluation in held],
                )
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


@click.command()
@click.argument("benchmark", required=False, shell_complete=benchmarks)
@click.argument("overrides", nargs=-1, metavar="[A.B=VALUE]...")
@click.option(
    "--problems", multiple=True, metavar="PATTERN", help="Problems to solve, such as 'n1000-*'; may be repeated."
)
@click.option("--solvers", multiple=True, metavar="PATTERN", help="Solvers to use; may be repeated.")
@click.option("--workers", type=click.IntRange(1), help="Number of solves side by side; above 1 implies --backend ray.")
@click.option("--backend", type=click.Choice(["local", "ray"]), help="Solve in this process, or on actors of Ray.")
@click.option("--address", metavar="HOST:PORT", help="A running Ray cluster to join (or auto); implies --backend ray.")
@click.option("--retry", is_flag=True, help="Restart instances that failed, or whose solver did not take the problem.")
@click.option(
    "--output", type=FOLDER, default=Path("runs"), show_default=True, help="Folder of all runs and benchmarks."
)
def benchmark(
    benchmark: str | None,
    overrides: tuple[str, ...],
    problems: tuple[str, ...],
    solvers: tuple[str, ...],
    *,
    workers: int | None,
    backend: str | None,
    address: str | None,
    retry: bool,
    output: Path,
) -> None:
    """Solve every problem of a benchmark with each of its solvers: BENCHMARK is a YAML file, or a packaged one.

    Each instance is a run of its own in OUTPUT/NAME. The same command continues a benchmark that was interrupted or
    killed; instances that have ended are not repeated. Without BENCHMARK the packaged ones are listed.

    \b
    narrowcast benchmark completion-65 --problems 'n1000-r2-*' --workers 2
    narrowcast benchmark completion-65 solve.solver_seconds=5 --solvers scaled_asd --solvers r3mc
    narrowcast compare runs/completion-65                     the finished instances
    narrowcast sync runs/completion-65                        send what MLflow missed
    """  # noqa: D301 - click wants the character
    from narrowcast.benchmarking.file import TABLE, load_benchmark, packaged_benchmarks
    from narrowcast.benchmarking.run import BenchmarkDisplay, prepare_benchmark, run_benchmark
    from narrowcast.cluster.decisions import check_address_of

    if benchmark is None:
        print_summaries("benchmark", packaged_benchmarks())
        return
    check_address_of(backend, address)
    kind = "ray" if address is not None or (workers or 1) > 1 else backend
    settings = {"backend": kind, "workers": workers, "address": address}
    by_options = [f"{name}={value}" for name, value in settings.items() if value is not None]
    chosen = load_benchmark(benchmark, [*overrides, *by_options]).only(problems, solvers)
    prepared = prepare_benchmark(chosen, output, retry=retry)
    folder, terminal = prepared.folder.path, console()
    if done := len(chosen.instances) - len(prepared.left):
        click.echo(f"{chosen.file.name}: {done} of {len(chosen.instances)} instances have ended already")
    try:
        with BenchmarkDisplay(chosen.instances, prepared.left, terminal) as display:
            result = run_benchmark(prepared, display)
    except KeyboardInterrupt:
        raise RunFailed("interrupted; run the same command again to continue") from None
    for part in result.summary().fitting(terminal.width):
        terminal.print(part)
    click.echo(f"table   {folder / TABLE}")
    ui = shlex.join(["narrowcast", "ui", "--output", str(folder)])
    click.echo(f"MLflow  {prepared.store.shown}\n        open it with: {ui}")
    failed = result.failures()
    for name, reason in failed.items():
        complain(f"{name} failed: {reason}")
    if failed and not any(row["state"] == "finished" for row in result.rows):
        raise RunFailed(f"none of {len(result.rows)} instances finished, and {len(failed)} failed")


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
    "--backend",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Where the runs of a study go: to processes of this machine, or to actors on Ray.",
)
@click.option("--address", help="Ray cluster to join, host:port or auto.  [default: one of its own, or RAY_ADDRESS]")
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
    backend: str,
    address: str | None,
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
    from narrowcast.studies.reproduction import draw_study, run_recorded
    from narrowcast.studies.tables import Effort, RecordedTable
    from narrowcast.studies.verdicts import verdict_table

    words = ["narrowcast", "reproduce", name, *(["--papers", str(papers)] if papers else [])]
    words += ["--seeds", str(seeds), "--output", str(output)]
    words += ["--rounds", str(rounds)] if rounds else []
    words += ["--jobs", str(jobs)] if jobs else []
    words += ["--backend", backend] if backend != "local" else []
    same_command = shlex.join([*words, *(["--address", address] if address else [])])
    at_once = jobs or os.cpu_count() or 1
    ray = None
    if backend == "ray":
        from narrowcast.cluster.backend import RayBackend

        ray = RayBackend(actors=at_once, address=address)
    elif address is not None:
        raise UserError(f"--address {address} is of a Ray cluster; give --backend ray too")
    effort = Effort(seeds, rounds, at_once, time_limit, ray)
    try:
        table_of = target.table()
        if isinstance(table_of, RecordedTable):
            done = run_recorded(target, table_of, effort, output=output, say=_say)
        else:
            done = draw_study(target, table_of, effort, results=results or target.results, output=output)
            if keep:
                table_of.keep(output, results or target.results)
    except RunFailed as error:
        raise RunFailed(f"{error} [{same_command}]") from error
    except KeyboardInterrupt:
        raise RunFailed(f"interrupted; resume with: {same_command}") from None
    console().print(verdict_table(done.title, done.verdicts))
    for line in (*done.notes, *map(str, done.files)):
        click.echo(line)


def _say(line: str) -> None:
    print(line, flush=True)
