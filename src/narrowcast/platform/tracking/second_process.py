"""A second process, in which `narrowcast run` calls MLflow and Matplotlib while it imports torch and trains itself.

It keeps nothing that would be missed: the journal, the position in it and every file of a run are written by the run's
own process. It ends with that process, however that ends, since their connection is then closed. If it is killed, the
calls are made in the run's own process.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from narrowcast.platform.config.redaction import redact
from narrowcast.platform.errors import StoreError
from narrowcast.platform.storage.host import defer_signals

if TYPE_CHECKING:
    from narrowcast.platform.tracking import figures as run_figures
    from narrowcast.platform.tracking import partition_figure
    from narrowcast.platform.tracking import store as mlflow_store


__all__ = [
    "CallsClosedError",
    "SecondProcess",
    "begin",
    "call",
    "mlflow_store",
    "partition_figure",
    "run_figures",
    "second_process",
    "serve",
]
logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
_STORE, _FIGURES, _PARTITION = (
    f"{__name__.rpartition('.')[0]}.{name}" for name in ("store", "figures", "partition_figure")
)
_PROGRAM = (
    f"import json, sys; sys.path[:] = json.loads(sys.argv[2]); from {__name__} import serve; serve(int(sys.argv[1]))"
)


class CallsClosedError(StoreError):
    """A call of a thread that outlives the run, whose second process has ended."""

    def __init__(self) -> None:
        super().__init__("no answer before the end of the run")


@dataclass(frozen=True)
class _Function:
    module: str
    name: str

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return getattr(import_module(self.module), self.name)(*arguments, **named)


@dataclass(frozen=True)
class _LazyModule:
    module: str

    def __getattr__(self, name: str) -> _Function:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Function(self.module, name)


if not TYPE_CHECKING:  # modules whose functions `begin` and `call` take, imported where a function is called
    mlflow_store, run_figures, partition_figure = map(_LazyModule, (_STORE, _FIGURES, _PARTITION))


@dataclass(frozen=True)
class _Request:
    number: int
    function: _Function
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    environment: Mapping[str, str] | None
    """The variables of the caller's environment, None if they are those of its last request."""


class SecondProcess:
    """The caller's end of the connection; calls of several threads are made at once."""

    def __init__(self) -> None:
        self._connection, other = Pipe()
        # -P: modules in the current folder are found only if this process finds them.
        words = [sys.executable, "-P", "-c", _PROGRAM, str(other.fileno()), json.dumps(sys.path)]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            start_new_session=True,  # signals of a terminal and of a group are for the run, which still needs it
        )
        other.close()
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers, self._sending = count(), threading.Lock()
        self._environment = dict(os.environ)
        self._ended = self.closed = False
        self._reader = threading.Thread(target=self._receive, name="second-process", daemon=True)
        self._reader.start()

    def begin(self, function: _Function, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Future[Any] | None:
        """Begin a call; return None if the process has ended."""
        with defer_signals(), self._sending:  # half a message would spoil those after it
            if self._ended:
                return None
            changed = self._environment != (now := dict(os.environ))
            self._environment = now
            request = _Request(next(self._numbers), function, arguments, named, now if changed else None)
            future = self._waiting[request.number] = Future()
            try:
                self._connection.send(request)
            except OSError:
                return None
        return future

    def _receive(self) -> None:
        try:
            while True:
                number, value, error = self._connection.recv()
                future = self._waiting.pop(number)
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
        except Exception as error:  # an end of the process, or an answer that cannot be read: nobody waits for more
            logger.debug("no more answers of the second process: %s: %s", type(error).__name__, error)
            with self._sending:
                self._ended = True
            for future in self._waiting.values():
                future.cancel()

    def close(self) -> None:
        """End the process, and what it has not finished."""
        lost, self.closed = self._ended, True
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._connection.close()
        if lost:
            logger.warning("the second process was killed; MLflow and the figures were left to this one")


_current: ContextVar[SecondProcess | None] = ContextVar("second_process", default=None)


@contextmanager
def second_process() -> Iterator[None]:
    """Make the calls of the block in a second process.

    They are made in this one if it has imported MLflow already, or cannot start another.
    """
    process = None if "mlflow" in sys.modules else _started()
    token = _current.set(process)
    try:
        yield
    finally:
        _current.reset(token)
        if process is not None:
            process.close()


def _started() -> SecondProcess | None:
    try:
        return SecondProcess()
    except OSError as error:  # a limit of processes, or of memory
        logger.debug("no second process: %s", error)
        return None


def begin(function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> Callable[[], R]:
    """Begin to call a function of a lazy module if there is a second process; return a function that waits for its end.

    Raise `CallsClosedError` once that process was closed, at the end of the run.
    """

    def here() -> R:
        return function(*arguments, **named)

    process = _current.get()
    if process is not None and process.closed:  # a thread that a store keeps waiting outlives the run
        raise CallsClosedError
    if process is None or (future := process.begin(cast(_Function, function), arguments, named)) is None:
        return here

    def result() -> R:
        try:
            return cast(R, future.result())
        except CancelledError:
            if process.closed:
                raise CallsClosedError from None
            return here()

    return result


def call(function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
    """Call a function of a lazy module, in the second process if there is one, and return or raise what it does."""
    return begin(function, *arguments, **named)()


def serve(descriptor: int) -> None:
    """Answer the calls of the process at the other end until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(descriptor)
    imported = {module: threading.Event() for module in (_STORE, _PARTITION, _FIGURES)}
    threading.Thread(target=_answer_all, args=(connection, imported), daemon=True).start()
    gc.disable()  # it would take a fifth of the time
    for module, event in imported.items():
        try:
            import_module(module)
            if module == _STORE and not os.environ.get("MLFLOW_TRACKING_URI", "").startswith("http"):
                from narrowcast.platform.tracking.store import import_sql_store

                import_sql_store()
        except ImportError as error:  # a call imports it again, and its caller hears of it
            logger.debug("%s", error)
        finally:
            event.set()
    gc.freeze()
    gc.enable()
    threading.Event().wait()


def _answer_all(connection: Connection, imported: Mapping[str, threading.Event]) -> None:
    answering = threading.Lock()
    while True:
        try:
            request: _Request = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        if request.environment is not None:
            for name in os.environ.keys() - request.environment.keys():
                del os.environ[name]
            os.environ.update(request.environment)
        # In a thread each: a store that hangs keeps no figure waiting.
        arguments = (request, connection, answering, imported[request.function.module])
        threading.Thread(target=_answer, args=arguments, daemon=True).start()


def _answer(request: _Request, connection: Connection, answering: threading.Lock, imported: threading.Event) -> None:
    imported.wait()  # two threads that import the same packages could meet half of one
    value, error = None, None
    try:
        value = request.function(*request.arguments, **request.named)
    except Exception as raised:  # sent to the caller, which may not have the libraries that others are of
        known = type(raised).__module__.startswith(("builtins", "narrowcast."))
        error = raised if known else RuntimeError(redact(f"{type(raised).__name__}: {raised}"))
    with answering:
        try:
            connection.send((request.number, value, error))
        except OSError:  # the caller has gone
            return
        except Exception as unsendable:  # pickled before anything is sent, so the connection is intact
            reason = f"{type(unsendable).__name__}: {unsendable}"
            connection.send((request.number, None, RuntimeError(f"no answer of {request.function.name} ({reason})")))
