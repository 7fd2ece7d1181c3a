"""The page of runs: it opens to its token alone, for page, API and files, and the token is written nowhere else."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingUnixStreamServer

import psutil
import pytest
import requests
from mlflow import MlflowClient

from narrowcast.platform.tracking.view import guarded

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
SECONDS = 100  # MLflow takes some to start
API = "api/2.0/mlflow"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Page:
    """A running `narrowcast ui`, what it has printed so far and what else it wrote, and a run in its store."""

    port: int
    printed: str
    log: Path
    process: subprocess.Popen[str]
    run_id: str

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def token(self) -> str:
        return self.printed.partition("token=")[2].partition("#")[0]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("pages")
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.create_experiment("narrowcast", (folder / "mlartifacts").as_uri())
    run_id = client.create_run(experiment).info.run_id
    client.log_text(run_id, "private", "config.yaml")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "narrowcast", "ui", "--output", str(folder), "--port", str(port)]
    with (folder / "log").open("w") as log, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True
    ) as process:  # fmt: skip
        assert process.stdout is not None
        printed = process.stdout.readline() + process.stdout.readline()
        yield Page(port, printed, folder / "log", process, run_id)
        process.terminate()
        assert process.wait(30) == 0
        assert process.stdout.read().count("token") == 0


def get(page: Page, path: str, **headers: str) -> requests.Response:
    return requests.get(page.root + path, headers=headers, timeout=SECONDS, allow_redirects=False)


@pytest.mark.slow
def test_nothing_is_answered_without_the_token(page: Page) -> None:
    wrong = page.token[:-1] + ("a" if page.token[-1] != "a" else "b")
    for path in (
        "",
        "health",
        f"{API}/experiments/search?max_results=5",
        f"get-artifact?path=c&run_uuid={page.run_id}",
    ):
        for headers in (
            {},
            {"Authorization": f"Bearer {wrong}"},
            {"Authorization": "Bearer "},
            {"Authorization": f"Basic {page.token}"},
            {"Cookie": f"narrowcast-{page.port}={wrong}"},
            {"Cookie": f"narrowcast-1={page.token}"},
            {"Cookie": "\xff=;;"},
        ):
            assert get(page, path, **headers).status_code == 401, (path, headers)
        assert get(page, f"{path}{'&' if '?' in path else '?'}token={wrong}").status_code == 401
    for path, body in ((f"{API}/runs/delete", {"run_id": page.run_id}), (f"{API}/runs/log-metric", {})):
        assert requests.post(page.root + path, json=body, timeout=SECONDS).status_code == 401
    assert len(page.token) == 32


@pytest.mark.slow
def test_no_server_but_this_one_can_be_reached(page: Page) -> None:
    """Neither by a port of the server behind, nor by its socket, whose folder is the user's alone."""
    assert get(page, "", Authorization=f"Bearer {page.token}").ok
    family = [psutil.Process(page.process.pid), *psutil.Process(page.process.pid).children(recursive=True)]
    assert {each.laddr.port for one in family for each in one.net_connections("inet") if each.status == "LISTEN"} == {
        page.port
    }
    places = {
        Path(each.laddr) for one in family for each in one.net_connections("unix") if "narrowcast-ui" in each.laddr
    }
    assert [place.parent.stat().st_mode & 0o777 for place in places] == [0o700]


def test_a_request_that_is_none_is_refused(page: Page) -> None:
    for sent in (b"GET /\r\n\r\n", b"\r\n\r\n", b"GET /?token=%ff HTTP/1.1\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", page.port), timeout=SECONDS) as connection:
            connection.sendall(sent)
            assert connection.recv(100).startswith(b"HTTP/1.1 401 ")
    with socket.create_connection(("127.0.0.1", page.port), timeout=SECONDS) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + b"a" * 100_000)
        with suppress(ConnectionResetError):
            assert connection.recv(100) == b""


def test_the_printed_address_opens_the_page_and_its_cookie_the_rest(page: Page) -> None:
    with requests.Session() as browser:
        first = browser.get(page.printed.split()[3].partition("#")[0], timeout=SECONDS)
        assert [each.status_code for each in (*first.history, first)] == [303, 200]
        assert (first.url, "<title>MLflow</title>" in first.text) == (page.root, True)
        cookie = first.history[0].headers["Set-Cookie"]
        assert cookie.endswith("; HttpOnly; SameSite=Lax; Path=/")
        there = browser.get(f"{page.root}{API}/experiments/search?max_results=5", timeout=SECONDS)
        assert {each["name"] for each in there.json()["experiments"]} == {"narrowcast", "Default"}
        name = f"get-artifact?path=config.yaml&run_uuid={page.run_id}"
        assert browser.get(page.root + name, timeout=SECONDS).text == "private"
        other = browser.get(page.root, headers={"Host": "evil.example"}, timeout=SECONDS)
        assert other.status_code == 403


def test_a_client_of_mlflow_has_the_token_in_its_environment(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", page.token)
    client = MlflowClient(page.root)
    client.log_metric(page.run_id, "x", 1.5)
    assert client.get_run(page.run_id).data.metrics == {"x": 1.5}
    assert [each.path for each in client.list_artifacts(page.run_id)] == ["config.yaml"]


def test_the_token_is_in_no_log_and_no_list_of_processes(page: Page) -> None:
    assert get(page, f"?token={page.token}").status_code == 303
    family = [psutil.Process(page.process.pid), *psutil.Process(page.process.pid).children(recursive=True)]
    assert len(family) > 1
    for each in family:
        assert page.token not in " ".join(each.cmdline())
        assert page.token not in " ".join(each.environ().values())
    assert page.token not in page.log.read_text()


def test_a_server_that_is_gone_is_a_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowcast.platform.tracking.view._START_SECONDS", 0.2)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        root = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        with guarded(listening, tmp_path / "none") as token:
            answer = requests.get(root, headers={"Authorization": f"Bearer {token}"}, timeout=SECONDS)
            assert (answer.status_code, answer.text) == (503, "The MLflow server does not answer.\n")


@pytest.mark.slow
@pytest.mark.program(*CHROMIUM)
def test_a_link_on_a_page_of_another_site_opens_the_page(tmp_path: Path) -> None:
    """A browser follows it with the cookie that the redirect has just set."""
    answered = list[bytes]()

    class Behind(StreamRequestHandler):
        def handle(self) -> None:
            answered.append(self.rfile.readline().strip())
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nin")

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(f"<a href='{link}'>runs</a><script>document.links[0].click()</script>".encode())

        def log_message(self, *_: object) -> None:
            pass

    with (
        tempfile.TemporaryDirectory(prefix="nc") as folder,
        socket.socket() as listening,
        ThreadingUnixStreamServer(f"{folder}/s", Behind) as behind,
        ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as elsewhere,
    ):
        for each in (behind, elsewhere):
            threading.Thread(target=each.serve_forever, daemon=True).start()
        listening.bind(("127.0.0.1", 0))
        with guarded(listening, Path(folder, "s")) as token:
            link = f"http://127.0.0.1:{listening.getsockname()[1]}/?token={token}"
            program = str(next(filter(None, map(shutil.which, CHROMIUM))))
            words = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
            site = f"http://localhost:{elsewhere.server_address[1]}/"  # another site than 127.0.0.1
            with subprocess.Popen(
                [program, *words, f"--user-data-dir={tmp_path}", site],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ) as browser:
                deadline = time.monotonic() + SECONDS
                while not answered and time.monotonic() < deadline:
                    time.sleep(0.1)
                for each in psutil.Process(browser.pid).children(recursive=True):
                    each.kill()
                browser.kill()
        behind.shutdown()
        elsewhere.shutdown()
    assert answered[:1] == [b"GET / HTTP/1.1"]
