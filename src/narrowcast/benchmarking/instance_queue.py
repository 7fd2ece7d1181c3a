"""The instances of a benchmark that have not ended, as the queue that `dispatch` gives workers their jobs from."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from narrowcast.benchmarking.benchmark_file import Instance
from narrowcast.benchmarking.benchmark_folder import BenchmarkFolder
from narrowcast.benchmarking.instance_runner import InstanceEnd, InstanceJob
from narrowcast.platform.errors import RunFailed
from narrowcast.runs.solve_result import load_solve_result

_ATTEMPTS = 3
"""Attempts at an instance whose worker dies, which the instance may cause by its memory."""
Observer = Callable[[Instance, InstanceEnd | None], None]
"""Is called with an instance when it begins, with None, and when it ends."""


class InstanceQueue:
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
        self._waiting = deque(left)
        self._by_name = {each.name: each for each in left}
        self._attempts: Counter[str] = Counter()
        self._problems: dict[str, str] = {}
        for each in finished:
            self._problems.setdefault(_problem_of(each), load_solve_result(folder.path / each.name).file.problem_sha256)

    def next_job(self) -> InstanceJob | None:
        """Note that the next instance begins, and return it."""
        if not self._waiting:
            return None
        instance = self._waiting.popleft()
        self._attempts[instance.name] += 1
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

    def worker_died(self, job: InstanceJob, reason: str) -> None:
        """Queue the instance again, which resumes it; after some attempts it has failed."""
        if self._attempts[job.instance.name] < _ATTEMPTS:
            self._waiting.append(job.instance)
            return
        self.answer_to(InstanceEnd(job.instance.name, "failed", f"{reason}, {_ATTEMPTS} times"))

    def heartbeat(self) -> None:
        """Do nothing: no other process needs to know of these instances."""

    def is_finished(self) -> bool:
        """Return True: no instances come from elsewhere."""
        return True


def _problem_of(instance: Instance) -> str:
    return repr(instance.solve.problem_source)
