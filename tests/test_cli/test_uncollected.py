"""Imports without garbage collection, in a process that runs several commands."""

import subprocess
import sys

TWO_COMMANDS = """
import gc, weakref
from narrowcast.cli.uncollected import uncollected

class Run:
    pass

with uncollected():
    assert not gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count()
run = Run()
run.itself = run
alive = weakref.ref(run)
del run
with uncollected():
    pass
gc.collect()
assert gc.isenabled() and alive() is None
"""


def test_the_garbage_of_a_command_does_not_outlive_the_next_one() -> None:
    subprocess.run([sys.executable, "-c", TWO_COMMANDS], check=True)
