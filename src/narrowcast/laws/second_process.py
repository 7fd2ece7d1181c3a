"""The digests of cases in a second process, where Python hashes text otherwise and global generators have other seeds.

What differs there depends on the process that computes it: no run of such a class can be verified, resumed, or moved to
another host.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from narrowcast.laws.law import Cases, Verdict
from narrowcast.platform.errors import described
from narrowcast.platform.seeds import isolated, moved_since, seed_generators, states
from narrowcast.platform.storage.disk import write_atomically

LAW = "its results are the same in another process"
DigestOf = Callable[[Any], str]
"""Map a case to the sha256 of what a class computes in it."""

_WORD = 0x5DEE_CE66_D1CE_B00C
_SECONDS = 600
_CALL, _ANSWER, _SAID = "call.pickle", "answer.json", "said.txt"


@dataclass(frozen=True)
class SecondProcess:
    """A process that digests the cases of a class; `folder` has its call, and then its answer."""

    digest_of: DigestOf
    cases: Cases[Any]
    folder: Path
    process: subprocess.Popen[bytes]

    def verdict(self) -> Verdict:
        """Return whether the digests of the second process are those of this one."""
        answer = self._answer()
        if isinstance(answer, str):
            return Verdict(LAW, len(self.cases), answer)
        for label, case in self.cases.items():
            try:
                equal = self.digest_of(case) == answer[label]
            except (Exception, SystemExit) as error:
                return Verdict(LAW, len(self.cases), _labelled(label, described(error)))
            if not equal:
                return Verdict(LAW, len(self.cases), _labelled(label, f"they differ: {self._cause(label, answer)}"))
        return Verdict(LAW, len(self.cases), None)

    def _answer(self) -> dict[str, str] | str:
        """Return the digests of the second process by label, or why there are none."""
        try:
            self.process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it takes longer than {_SECONDS} s there"
        if not (self.folder / _ANSWER).is_file():
            lines = (self.folder / _SAID).read_text(errors="replace").strip().splitlines()
            return f"it fails there: {(lines or [f'the process ends with exit status {self.process.returncode}'])[-1]}"
        answer: dict[str, str] = json.loads((self.folder / _ANSWER).read_text())
        return answer

    def _cause(self, label: str, answer: Mapping[str, str]) -> str:
        digests: list[str] = []
        moved: tuple[str, ...] = ()
        for word in (0, _WORD):
            with isolated(word):
                before = states()
                digests.append(self.digest_of(self.cases[label]))
                moved = moved_since(before)
        if moved and digests[0] != digests[1]:
            return (
                f"it draws from {' and '.join(moved)}, whose state is that of a whole process; draw from "
                "numpy.random.default_rng of a seed or key that it is given"
            )
        with _started(self.digest_of, {label: self.cases[label]}) as third:
            again = third._answer()
        if isinstance(again, dict) and again[label] == answer[label]:
            return "it depends on Python's hash of text, or on the order of a set, which each process has its own of"
        return "it depends on a generator without a seed, on the time, or on where objects lie in memory"


def _labelled(label: str, reason: str) -> str:
    return f"{label}: {reason}" if label else reason


@contextmanager
def started(digest_of: DigestOf, cases: Cases[Any]) -> Iterator[Callable[[], Verdict]]:
    """Start a process that digests the cases, and yield a function that waits for its verdict."""
    try:
        pickle.dumps((digest_of, cases))
    except Exception as error:
        problem = Verdict(LAW, len(cases), f"it cannot be pickled: {described(error)}")
        yield lambda: problem
        return
    with _started(digest_of, cases) as process:
        yield process.verdict


@contextmanager
def _started(digest_of: DigestOf, cases: Cases[Any]) -> Iterator[SecondProcess]:
    with TemporaryDirectory(prefix="narrowcast-check-") as name:
        folder = Path(name)
        (folder / _CALL).write_bytes(pickle.dumps(sys.path) + pickle.dumps((digest_of, cases)))
        seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        with (folder / _SAID).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(folder)],
                env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
            )
        try:
            yield SecondProcess(digest_of, cases, folder, process)
        finally:
            process.kill()
            process.communicate()


def _answer_call(folder: Path) -> None:
    with (folder / _CALL).open("rb") as file:
        sys.path[:] = pickle.load(file)
        digest_of, cases = pickle.load(file)
    seed_generators(_WORD)
    digests = {label: digest_of(case) for label, case in cases.items()}
    write_atomically(folder / _ANSWER, json.dumps(digests).encode())


def _end_with_the_caller() -> None:
    """End this process once its caller, which alone has the other end of its stdin, is gone."""
    os.read(sys.stdin.fileno(), 1)  # a buffered read would hold a lock as Python shuts down
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    _answer_call(Path(sys.argv[1]))
