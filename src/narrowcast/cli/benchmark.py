"""`narrowcast benchmark`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from narrowcast.cli.shared import FOLDER, benchmarks, complain, console, print_summaries
from narrowcast.platform.errors import RunFailed


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
    from narrowcast.cluster.resources import check_address_of

    if benchmark is None:
        print_summaries("benchmark", packaged_benchmarks())
        return
    check_address_of(backend, address)
    kind = "ray" if address is not None or (workers or 1) > 1 else backend
    given = {"backend": kind, "workers": workers, "address": address}
    own = [f"{name}={value}" for name, value in given.items() if value is not None]
    chosen = load_benchmark(benchmark, [*overrides, *own]).only(problems, solvers)
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
