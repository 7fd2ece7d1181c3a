"""The page of runs: a view of an experiment in the MLflow UI, behind a door that opens to a token alone.

The view has columns of test metrics and costs, and charts in sections. MLflow opens an experiment as one of generative
AI, without metric columns, unless a tag says otherwise. A shared view, which its button "Share" writes too, is another
tag; the address of the page names it. The format of that tag is undocumented; it was checked in a browser with
`store.CHECKED_VERSION`. A page that does not understand it says so and shows its own columns.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import socket
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from mlflow.exceptions import MlflowException

from narrowcast.platform.tracking.metrics import CLIENTS, STATISTICS, metric_label, metrics_of
from narrowcast.platform.types import ITERATION_COLUMNS

if TYPE_CHECKING:
    from mlflow import MlflowClient


_VIEW, _KIND, _MEASURED = "mlflow.sharedViewState.narrowcast", "mlflow.experimentKind", "narrowcast.metrics"
PAGE = "#/experiments/{experiment_id}/runs?workflowType=machine_learning&viewStateShareKey=narrowcast"
"""The address of the view, below that of the MLflow UI."""
EXPERIMENTS = "#/experiments?workflowType=machine_learning"
"""The address of the list of experiments; without the parameter MLflow's sidebar is that of generative AI."""
_SOLVER_SECONDS = "solver_seconds"
_PARAMS_OF_SOLVE = ("solver.kind", "problem.kind", "seed")
_PARAMS = ("algorithm.kind", "data.kind", "seed")
_COSTS = ("total_uplink_bits", "total_bits", "simulated_seconds", "wall_seconds")
_AGAINST = {"step": "round", "total_uplink_bits": "uplink", "total_bits": "total traffic", "simulated_seconds": "time"}


def set_up_view(client: MlflowClient, experiment_id: str, measured: Iterable[str] = ()) -> None:
    """Tag an experiment as one of model training, with a view of the metrics that its runs have measured so far.

    `measured` are the names of a run's metrics, as MLflow has them. Nothing is sent if nothing is new.
    """
    tags: Mapping[str, str] = client.get_experiment(experiment_id).tags
    known = [name for name in tags.get(_MEASURED, "").split(",") if name]
    new = list(measured)
    of_solve = _SOLVER_SECONDS in new
    chosen = (name for name in new if (name not in ITERATION_COLUMNS and "_to." not in name) or name == _SOLVER_SECONDS)
    metrics = list(dict.fromkeys((*known, *(chosen if of_solve else filter(_is_of_split, new)))))
    wanted = {_KIND: "custom_model_development", _MEASURED: ",".join(metrics), _VIEW: _encoded(view(metrics))}
    for key, value in wanted.items():
        if tags.get(key) != value:
            with suppress(MlflowException):  # a user who may log runs, and not change the experiment, has no view
                client.set_experiment_tag(experiment_id, key, value)


def _is_of_split(metric: str) -> bool:
    return metric.startswith(("test.", "validation."))


def view(metrics: Sequence[str]) -> dict[str, Any]:
    """Return the state of the UI's list of runs and of its charts."""
    if _SOLVER_SECONDS in metrics:
        return _view_of_solves([name for name in metrics if name != _SOLVER_SECONDS])
    test = [f"test.{name}" for name in _ordered(metrics, "test")]
    validation = [f"validation.{name}" for name in _ordered(metrics, "validation")]
    columns = [f"params.`{param}`" for param in _PARAMS]
    columns += [f"metrics.`{metric}`" for metric in (*(test or validation), *_COSTS)]
    against_costs = [name for name in test if name != "test.loss"] or test  # runs of several tasks share a store
    shown = [
        *((metric_label(_plain(name)), name, "step") for name in test),
        *(
            (f"{metric_label(_plain(metric))} by {_AGAINST[cost]}", metric, cost)
            for metric in against_costs
            for cost in _COSTS[:3]
        ),
    ]
    primary = (test or validation)[:1]
    over_clients = [f"{metric}.{statistic}" for metric in primary for statistic in STATISTICS if statistic != CLIENTS]
    sections = {
        "Test metrics": shown,
        "Metrics over clients": [
            (metric_label(_plain(metric)), metric, "step") for metric in over_clients if metric in metrics
        ],
        "Validation metrics": [(metric_label(_plain(metric)), metric, "step") for metric in validation],
        "Training loss": [("training loss", "loss", "step"), ("training loss by time", "loss", "simulated_seconds")],
        "Costs": [(metric.replace("_", " "), metric, "step") for metric in _COSTS],
    }
    return _state(columns, {name: charts for name, charts in sections.items() if charts})


def _view_of_solves(metrics: Sequence[str]) -> dict[str, Any]:
    """Return the state of the list of solves: their errors by iteration and against the time of the solver."""
    metrics = sorted(metrics, key=lambda name: not _is_of_split(name))
    columns = [f"params.`{param}`" for param in _PARAMS_OF_SOLVE]
    columns += [f"metrics.`{name}`" for name in (*metrics, "residual", _SOLVER_SECONDS)]
    names = [*metrics, "residual"]
    sections = {
        "By iteration": [(metric_label(name), name, "step") for name in names],
        "Against the time of the solver": [(f"{metric_label(name)} by time", name, _SOLVER_SECONDS) for name in names],
    }
    return _state(columns, sections, scale="log")


def _state(
    columns: Sequence[str], sections: Mapping[str, Sequence[tuple[str, str, str]]], scale: str = "linear"
) -> dict[str, Any]:
    return {
        "searchFilter": "",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "selectedColumns": ["attributes.`Duration`", *columns],
        "columnOrder": ["attributes.`Duration`", *columns],
        "compareRunCharts": [
            _line(f"{section}-{index}", section, *chart, scale)
            for section, charts in sections.items()
            for index, chart in enumerate(charts)
        ],
        "compareRunSections": [
            *(_section(name, shown=True) for name in sections),
            _section("Model metrics", shown=False),
            _section("System metrics", shown=False),
        ],
        "isAccordionReordered": True,
    }


def _ordered(metrics: Sequence[str], split: str) -> list[str]:
    """Return the metrics of a split as MLflow has them, the primary one first."""
    names = {_plain(name): name for name in metrics}
    return [names[f"{split}.{name}"].removeprefix(f"{split}.") for name in metrics_of(names, split)]


def _plain(name: str) -> str:
    return name.replace("_at_", "@")


def _section(name: str, *, shown: bool) -> dict[str, Any]:
    return {
        "uuid": name,
        "name": name,
        "display": shown,
        "isReordered": False,
        "deleted": False,
        "isGenerated": name in ("Model metrics", "System metrics"),
    }


def _line(uuid: str, section: str, label: str, metric: str, across: str, scale: str) -> dict[str, Any]:
    by_step = across == "step"
    return {
        "type": "LINE",
        "uuid": uuid,
        "metricSectionId": section,
        "deleted": False,
        "isGenerated": False,
        "displayName": label,
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "lineSmoothness": 0,
        "scaleType": scale,
        "xAxisScaleType": "linear",
        "xAxisKey": "step" if by_step else "metric",
        "selectedXAxisMetricKey": "" if by_step else across,
        "useGlobalXaxisKey": False,
        "useGlobalLineSmoothing": True,
        "range": {},
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "runsCountToCompare": 20,
    }


def _encoded(state: Mapping[str, Any]) -> str:
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode(), 9)).decode()
    return f"deflate;{packed}"


_HEAD_SECONDS, _START_SECONDS, _POLL_SECONDS = 30.0, 120.0, 0.1
_CHUNK_BYTES = 65_536
_PARAMETER = "token"
_REFUSAL = "This page opens by the address that narrowcast ui has printed, which has a token, and by no other.\n"
_CLOSING = "Connection: close\r\nCache-Control: no-store\r\nReferrer-Policy: no-referrer\r\n"


@contextmanager
def guarded(listening: socket.socket, server: Path) -> Iterator[str]:
    """Pass connections to the server at a Unix socket within the block, if they have the token that is yielded.

    The listening socket is one of 127.0.0.1, to which every account of the machine can connect. The first request of a
    connection has to have the token: in its address, which is answered by a cookie and a redirect, in that cookie, or
    as `Authorization: Bearer`, as MLflow's client sends `MLFLOW_TRACKING_TOKEN`. All that follows on the connection is
    the same client's, and is passed on unread.

    The cookie is SameSite=Lax: where a page of another site has the link, a browser does not send a strict one even
    after the redirect. Forms and frames of other sites come without it, and so without an answer.
    """
    door = _Door(listening, server)
    ready = threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(door.serve(ready.set),), name="pages", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield door.token
    finally:
        door.close()
        thread.join()


class _Door:
    """The listening socket, its token and its connections."""

    def __init__(self, listening: socket.socket, server: Path) -> None:
        self.token = secrets.token_urlsafe(24)
        self._listening, self._server = listening, server
        self._cookie = f"narrowcast-{listening.getsockname()[1]}"  # cookies are sent to every port of a host
        self._loop: asyncio.AbstractEventLoop
        self._closed: asyncio.Event

    async def serve(self, ready: Callable[[], None]) -> None:
        """Answer connections until `close`."""
        self._loop, self._closed = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._met, sock=self._listening)
        ready()
        await self._closed.wait()
        server.close()  # its connections end with the loop

    def close(self) -> None:
        """End all connections."""
        self._loop.call_soon_threadsafe(self._closed.set)

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_SECONDS)
                target, headers = _parts(head)
                if self._is_token(_in_address(target)):
                    cookie = f"Set-Cookie: {self._cookie}={self.token}; HttpOnly; SameSite=Lax; Path=/\r\n"
                    writer.write(_answer("303 See Other", f"Location: /\r\n{cookie}"))
                elif self._is_token(self._shown(headers)):
                    await self._pass_on(head, reader, writer)
                else:
                    writer.write(_answer("401 Unauthorized", "WWW-Authenticate: Bearer\r\n", _REFUSAL))
                await writer.drain()
        finally:
            writer.close()

    def _is_token(self, shown: str) -> bool:
        return secrets.compare_digest(shown.encode(), self.token.encode())

    def _shown(self, headers: Mapping[str, str]) -> str:
        """Return the token of a request's headers, empty if it has none."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return bearer.strip()
        cookies = SimpleCookie()
        with suppress(CookieError):
            cookies.load(headers.get("cookie", ""))
        return cookies[self._cookie].value if self._cookie in cookies else ""

    async def _pass_on(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await self._connected()
        except OSError:
            writer.write(_answer("503 Service Unavailable", text="The MLflow server does not answer.\n"))
            return
        to_server.write(head)
        sending = asyncio.create_task(_copy(reader, to_server))
        try:
            await _copy(from_server, writer)
        finally:
            sending.cancel()
            to_server.close()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the server, which takes seconds to start; raise `OSError` if it does not."""
        deadline = self._loop.time() + _START_SECONDS
        while True:
            try:
                return await asyncio.open_unix_connection(str(self._server))
            except (FileNotFoundError, ConnectionRefusedError):
                if self._loop.time() > deadline:
                    raise
                await asyncio.sleep(_POLL_SECONDS)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()


def _parts(head: bytes) -> tuple[str, dict[str, str]]:
    """Return the target and the headers of a request, by their names in small letters; both empty if malformed."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    pairs = (line.partition(":") for line in lines)
    return words[1] if len(words) == 3 else "", {name.strip().lower(): value.strip() for name, _, value in pairs}


def _in_address(target: str) -> str:
    """Return the token in the address of a request, empty if it has none."""
    with suppress(ValueError):  # not an address
        return parse_qs(urlsplit(target).query).get(_PARAMETER, [""])[0]
    return ""


def _answer(status: str, headers: str = "", text: str = "") -> bytes:
    length = f"Content-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
    return f"HTTP/1.1 {status}\r\n{headers}{length}{_CLOSING}\r\n{text}".encode()
