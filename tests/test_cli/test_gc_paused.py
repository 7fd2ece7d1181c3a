"""Imports without garbage collection, in a process that runs several commands."""

import subprocess
import sys

TWO_COMMANDS = """
import gc, weakref
from narrowcast.cli.shared import gc_paused

class Run:
    pass

with gc_paused():
    assert not gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count()
run = Run()
run.itself = run
alive = weakref.ref(run)
del run
with gc_paused():
    pass
gc.collect()
assert gc.isenabled() and alive() is None
"""


def test_the_garbage_of_a_command_does_not_outlive_the_next_one() -> None:
    subprocess.run([sys.executable, "-c", TWO_COMMANDS], check=True)
