"""A benchmark from its checks to its result: instances side by side, those that have ended left out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from narrowcast.benchmarking.benchmark_file import Benchmark, Instance
from narrowcast.benchmarking.benchmark_folder import TABLE, BenchmarkFolder
from narrowcast.benchmarking.benchmark_result import BenchmarkResult, as_csv, result_of
from narrowcast.benchmarking.instance_queue import InstanceQueue, Observer
from narrowcast.benchmarking.instance_runner import WorkerMemory, solve_instance
from narrowcast.cluster.ray_backend import RayBackend
from narrowcast.cluster.worker_pool import LocalPool, WorkerPool, dispatch
from narrowcast.platform.atomic_files import write_atomically
from narrowcast.platform.disk import GO_ON, writing
from narrowcast.platform.tracking.store_address import StoreAddress
from narrowcast.runs.run_folder import make_writable
from narrowcast.runs.run_place import checked_store


@dataclass(frozen=True)
class PreparedBenchmark:
    """A benchmark that has passed every check; `left` are the instances that have not ended."""

    benchmark: Benchmark
    folder: BenchmarkFolder
    left: Sequence[Instance]
    store: StoreAddress


def prepare_benchmark(benchmark: Benchmark, output: Path, *, retry: bool = False) -> PreparedBenchmark:
    """Check the cluster, the store and the runs that are there; `retry` begins those anew that failed or were skipped.

    Problems are loaded by the workers, so that a solver that does not take one is found then. Raise `UserError`.
    """
    file, folder = benchmark.file, BenchmarkFolder(output / benchmark.file.name)
    if file.backend == "ray":
        _ray_backend(benchmark).check_workers("workers")
    make_writable(output)
    folder.create()
    store = checked_store(benchmark.instances[0].solve, folder.path)
    with folder.locked():
        left = folder.left(benchmark.instances, retry=retry)
        folder.write(benchmark)
    return PreparedBenchmark(benchmark, folder, left, store)


def run_benchmark(prepared: PreparedBenchmark, observe: Observer = lambda _, __: None) -> BenchmarkResult:
    """Solve the instances that are left, write `instances.csv` of all in the file, and return the result.

    An instance that fails, or whose worker dies, does not end the others. Raise `RunFailed` if files cannot be written,
    or if the MLflow store does not take a run.
    """
    folder, file = prepared.folder, prepared.benchmark.file
    with writing(folder.path, GO_ON), folder.locked():
        try:
            if prepared.left:
                whole, left = prepared.benchmark.whole, {each.name for each in prepared.left}
                finished = [each for each in whole if each.name not in left and folder.is_finished(each)]
                queue = InstanceQueue(file.name, prepared.left, folder, observe, finished)
                with _worker_pool(prepared.benchmark) as pool:
                    dispatch(queue, pool, min(file.workers, len(prepared.left)))
        finally:
            rows = result_of(folder, prepared.benchmark.whole).rows
            write_atomically(folder.path / TABLE, as_csv(rows).encode())
    chosen = {each.name for each in prepared.benchmark.instances}
    return BenchmarkResult(folder.path, [row for row in rows if row["instance"] in chosen])


def _worker_pool(benchmark: Benchmark) -> AbstractContextManager[WorkerPool]:
    if benchmark.file.backend == "local":
        return nullcontext(LocalPool(solve_instance, WorkerMemory()))
    return _ray_backend(benchmark).worker_pool(solve_instance, WorkerMemory())


def _ray_backend(benchmark: Benchmark) -> RayBackend:
    file = benchmark.file
    return RayBackend(actors=file.workers, cpus_per_actor=file.cpus_per_worker, address=file.address)
