"""A door of 127.0.0.1 to a server on a Unix socket that opens to a token alone: every account can connect to a port.

The first request of a connection has to have the token: in its address, which is answered by a cookie and a redirect,
in that cookie, or as `Authorization: Bearer`, as MLflow's client sends `MLFLOW_TRACKING_TOKEN`. All that follows on the
connection is the same client's, and is passed on unread.

The cookie is SameSite=Lax: where a page of another site has the link, a browser does not send a strict one even after
the redirect. Forms and frames of other sites come without it, and so without an answer.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

_HEAD_SECONDS, _START_SECONDS, _POLL_SECONDS = 30.0, 120.0, 0.1
_CHUNK_BYTES = 65_536
_PARAMETER = "token"
_REFUSAL = "This page opens by the address that narrowcast ui has printed, which has a token, and by no other.\n"
_CLOSING = "Connection: close\r\nCache-Control: no-store\r\nReferrer-Policy: no-referrer\r\n"


@contextmanager
def guarded(listening: socket.socket, server: Path) -> Iterator[str]:
    """Pass connections to the server at a Unix socket within the block, if they have the token that is yielded."""
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
    """Return the target and the headers of a request, by their names in small letters; both empty if it is none."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    pairs = (line.partition(":") for line in lines)
    return words[1] if len(words) == 3 else "", {name.strip().lower(): value.strip() for name, _, value in pairs}


def _in_address(target: str) -> str:
    """Return the token in the address of a request, empty if it has none."""
    with suppress(ValueError):  # an address that is none
        return parse_qs(urlsplit(target).query).get(_PARAMETER, [""])[0]
    return ""


def _answer(status: str, headers: str = "", text: str = "") -> bytes:
    length = f"Content-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
    return f"HTTP/1.1 {status}\r\n{headers}{length}{_CLOSING}\r\n{text}".encode()
