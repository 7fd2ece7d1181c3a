"""Addresses and texts without the secrets in them: the only place where a password is removed from anything.

An address is parsed by the library that opens it: that of a database by SQLAlchemy, any other by urllib. One whose
password has an `@` or the like that is not percent-encoded can be read in two ways: it is hidden up to its scheme, and
refused where it would be used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from narrowcast.platform.errors import UserError

HIDDEN = "***"
T = TypeVar("T")

_DATABASES = frozenset(("postgresql", "postgres", "mysql", "mariadb", "sqlite", "mssql", "oracle", "cockroachdb"))
_SECRET = "password|passwd|pwd|passphrase|secret|token|api[_-]?key|access[_-]?key(?:[_-]?id)?|signature|credentials?"
_SECRET_NAME = re.compile(rf".*(?:{_SECRET})|sig|auth|key", re.IGNORECASE)
_ASSIGNMENT = re.compile(rf"([\w-]*(?:{_SECRET})=)(?!\*\*\*|environment\b)(?:\"[^\"]*\"|'[^']*'|[^\s&,;)]+)", re.IGNORECASE)
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://\S+")
_AROUND = "'\"`)>],;:."


def hide_secrets(address: str) -> str:
    """Return the address with `***` for its password, the user of a URL, and the values of parameters like `token`.

    Parameters after such a one are left out, since its value may go on there. A text without `://`, such as a path, is
    returned as it is.
    """
    scheme, found, _ = address.partition("://")
    if not found:
        return address
    try:
        in_database = scheme.partition("+")[0].lower() in _DATABASES
        shown = _of_database(address) if in_database else _of_url(address)
    except ValueError:  # no port, as where that is a part of a password
        shown = None if "@" in address or _ASSIGNMENT.search(address) else address
    return f"{scheme}://{HIDDEN}" if shown is None else shown


def has_hidden(address: str) -> bool:
    """Return whether `hide_secrets` has removed something from the address."""
    return HIDDEN in address


def check_address(address: str, name: str) -> None:
    """Raise `UserError` if the address can be read in two ways; `name` says where it is from."""
    scheme = address.partition("://")[0]
    if not has_hidden(address) and hide_secrets(address) == f"{scheme}://{HIDDEN}":
        raise UserError(
            f"{name} = {scheme}://{HIDDEN} is not a valid address; percent-encode the characters of its user and "
            "password that have a meaning in addresses: / is %2F, @ %40, : %3A, ? %3F, # %23"
        )


def redact(text: str) -> str:
    """Return the text with `***` for the secrets of the addresses in it, and for the values in `password=...`."""
    shown = _ADDRESS.sub(_hide_match, text) if "://" in text else text
    return _ASSIGNMENT.sub(rf"\1{HIDDEN}", shown) if "=" in shown else shown


def redact_values(values: T) -> T:
    """Return nested plain values with every text in them redacted."""
    found: Any = values
    if isinstance(values, str):
        found = redact(values)
    elif isinstance(values, Mapping):
        found = {key: redact_values(value) for key, value in values.items()}
    elif isinstance(values, list | tuple):
        found = type(values)(redact_values(value) for value in values)
    return found


def _hide_match(match: re.Match[str]) -> str:
    whole = match.group()
    address = whole.rstrip(_AROUND)
    return hide_secrets(address) + whole[len(address) :]


def _of_database(address: str) -> str | None:
    """Return the address without its password; None if it can be read in two ways."""
    from sqlalchemy.engine import make_url  # takes a quarter of a second
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(address)
    except ArgumentError:
        return None
    on_disk = url.get_backend_name() == "sqlite" and url.host is None
    user_given = url.username is not None or url.password is not None
    if (address.count("@") > user_given or re.search(r"\s", address)) and not on_disk:
        return None
    _, mark, query = address.rpartition("@")[2].partition("?")
    shown = _without_secret_parameters(query)
    if url.password is None and shown == query:
        return address
    return url.set(query={}).render_as_string(hide_password=True) + mark + shown


def _of_url(address: str) -> str | None:
    """Return the address without user, password and secret parameters; None if it can be read in two ways."""
    parts = urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    user_given = parts.netloc != host
    # As in s3://bucket/a@b; a query with an @ may be a part of a password.
    in_path_only = parts.scheme not in ("http", "https") and not {":", "@"} & {*parts.netloc, *parts.query}
    _ = parts.port  # raises ValueError if it is none
    if not in_path_only and (address.count("@") > user_given or re.search(r"\s", address)):
        return None
    query = _without_secret_parameters(parts.query)
    fragment = _without_secret_parameters(parts.fragment) if query == parts.query else ""
    if not user_given and (query, fragment) == (parts.query, parts.fragment):
        return address
    netloc = f"{HIDDEN}@{host}" if user_given else host
    return urlunsplit(parts._replace(netloc=netloc, query=query, fragment=fragment))


def _without_secret_parameters(query: str) -> str:
    """Return the parameters up to the first secret one, whose value may go on to the end if it is not encoded."""
    pairs: list[str] = []
    for pair in query.split("&"):
        name, equals, _ = pair.partition("=")
        if equals and _SECRET_NAME.fullmatch(unquote(name)):
            return "&".join([*pairs, f"{name}={HIDDEN}"])
        pairs.append(pair)
    return query
