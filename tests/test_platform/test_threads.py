"""One thread where results are computed, and as many as before once they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from narrowcast.platform.compiled import one_thread
from sampling import sampled


def blas_threads() -> set[int]:
    return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}


def test_torch_and_numpy_have_one_thread_and_get_theirs_back() -> None:
    before = torch.get_num_threads()
    with threadpool_limits(2, user_api="blas"):
        with one_thread():
            assert (torch.get_num_threads(), blas_threads()) == (1, {1})
        assert (torch.get_num_threads(), blas_threads()) == (before, {2})


def test_products_are_the_same_whatever_the_machine_has() -> None:
    tall = np.random.default_rng(0).standard_normal((1568, 128))
    grams = []
    for threads in (1, 2, 4):
        with threadpool_limits(threads, user_api="blas"), one_thread():
            grams.append(tall.T @ tall)
    assert all(np.array_equal(grams[0], each) for each in grams[1:])


LATE = """
import os, sys
import numpy, torch
from threadpoolctl import threadpool_info, threadpool_limits
from narrowcast.platform.compiled import one_thread

def threads():
    return {each["filepath"]: each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}

threadpool_limits(2, user_api="blas")
with one_thread():
    numpys = set(threads())
    if sys.argv[1] == "within":
        import scipy.linalg
        print(*(count for path, count in threads().items() if path not in numpys))
if sys.argv[1] == "after":
    import scipy.linalg
    threadpool_limits(2, user_api="blas")
    with one_thread():
        print(*(count for path, count in threads().items() if path not in numpys))
print(*(count for path, count in threads().items() if path not in numpys))
print(*(name for name in os.environ if name.endswith("_NUM_THREADS")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("users", sampled(["", "OPENBLAS_NUM_THREADS"], [""]))
@pytest.mark.parametrize("when", ["within", "after"])
def test_a_blas_that_is_loaded_late_has_one_thread_too(when: str, users: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    words = [sys.executable, "-c", LATE, when]
    environment |= {users: "2"} if users else {}
    said = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    inside, outside, variables = said.stdout.split("\n")[:3]
    assert (inside, outside, variables) == ("1", "2", users)


FORKED = """
import multiprocessing, sys
import narrowcast as nc

def run(name, shas):
    changes = {"rounds": 2, "evaluate_every": 1, "tracking.system_metrics": False, "name": name}
    shas[name] = nc.run("fedavg-digits", changes, backend="local", progress=False, output=sys.argv[1]).model_sha256

context = multiprocessing.get_context("fork")
shas = context.Manager().dict()
run("parent", shas)
child = context.Process(target=run, args=("child", shas))
child.start()
child.join(200)
child.kill()
print(shas.get("child") == shas["parent"])
"""


@pytest.mark.slow
def test_a_process_that_is_forked_after_a_run_does_the_same_run(tmp_path: Path) -> None:
    """OpenMP's threads are not forked, and a child that starts a loop of several waits for them for ever."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    words = [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path)]
    said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == "True\n", said.stderr
