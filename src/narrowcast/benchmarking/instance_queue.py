"""The instances of a benchmark that have not ended, as the queue that `dispatch` gives workers their jobs from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from narrowcast.benchmarking.benchmark_file import Instance
from narrowcast.benchmarking.benchmark_folder import BenchmarkFolder
from narrowcast.benchmarking.instance_runner import InstanceEnd, InstanceJob
from narrowcast.cluster.worker_pool import RetryQueue
from narrowcast.platform.errors import RunFailed
from narrowcast.runs.solve_result import load_solve_result

Observer = Callable[[Instance, InstanceEnd | None], None]
"""Is called with an instance when it begins, with None, and when it ends."""


class InstanceQueue(RetryQueue[InstanceJob, str]):
    """Waiting instances, in the order given; `finished` are those of the benchmark that have a result already."""

    def __init__(
        self,
        name: str,
        left: Sequence[Instance],
        folder: BenchmarkFolder,
        observe: Observer,
        finished: Iterable[Instance] = (),
    ) -> None:
        self._name, self._folder, self._observe = name, folder, observe
        self._by_name = {each.name: each for each in left}
        super().__init__(self._by_name)
        self._problems: dict[str, str] = {}
        for each in finished:
            self._problems.setdefault(_problem_of(each), load_solve_result(folder.path / each.name).file.problem_sha256)

    def job(self, key: str) -> InstanceJob:
        """Note that an instance begins, and return it."""
        instance = self._by_name[key]
        self._folder.note(instance, "begun")
        self._observe(instance, None)
        labels = {"benchmark": self._name, "benchmark.problem": instance.problem, "benchmark.solver": instance.solver}
        return InstanceJob(instance, self._folder.path, labels, self._problems.get(_problem_of(instance), ""))

    def answer_to(self, message: InstanceEnd) -> None:
        """Note the end of an instance; raise `RunFailed` for one that was stopped, which is left to do."""
        if message.state == "stopped":
            raise RunFailed(f"{message.reason}, then give the same command, which goes on")
        instance = self._by_name[message.name]
        if message.state == "finished":
            self._problems.setdefault(_problem_of(instance), message.result["problem_sha256"])
        self._folder.note(instance, message.state, message.reason)
        self._observe(instance, message)

    def key(self, job: InstanceJob) -> str:
        """Return the name of an instance, which is resumed if its worker dies."""
        return job.instance.name

    def give_up(self, key: str, reason: str) -> None:
        """Note that an instance has failed."""
        self.answer_to(InstanceEnd(key, "failed", reason))


def _problem_of(instance: Instance) -> str:
    return repr(instance.solve.problem_source)
