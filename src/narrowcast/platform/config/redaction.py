"""Addresses and texts without the secrets in them: the only place where a password is removed from anything.

An address is parsed by the library that opens it: that of a database by SQLAlchemy, any other by urllib. One whose
password has an `@` or the like that is not percent-encoded can be read in two ways: it is hidden up to its scheme, and
refused where it would be used. Of its parameters those stay that are known to be harmless, since a secret may have any
name. In other texts a value is hidden if its name says that it is one, or if it is written as credentials are. In a
command line, or a list of its words, that is the word after an option.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from narrowcast.platform.errors import UserError

HIDDEN = "***"
T = TypeVar("T")

_DATABASES = frozenset(("postgresql", "postgres", "mysql", "mariadb", "sqlite", "mssql", "oracle", "cockroachdb"))
_OF_DATABASES = (
    *("application_name", "cache", "charset", "check_same_thread", "client_encoding", "collation", "connect_timeout"),
    *("driver", "encoding", "host", "hostaddr", "immutable", "isolation_level", "keepalives", "mode", "pool_size"),
    *("port", "ssl", "sslmode", "target_session_attrs", "timeout", "timezone", "uri", "use_unicode", "user", "vfs"),
)
_OF_FILES = ("alt", "anon", "download", "endpoint", "endpoint_url", "format", "raw", "region", "version", "versionid")
_OF_PAGES = (
    *("detail", "experiment_id", "filter", "job_id", "limit", "max_results", "metric_key", "node_id", "offset"),
    *("order_by", "page", "path", "run_id", "run_uuid", "sort", "submission_id", "view_type", "viewstatesharekey"),
    *("workflowtype",),
)
_HARMLESS = frozenset((*_OF_DATABASES, *_OF_FILES, *_OF_PAGES))
"""Names of parameters whose values are shown, in lower case."""
_HARMLESS_VALUE = re.compile(r"[\w.,:+%/*-]*")
_SECRET = (
    r"[\w.-]*(?:password|passwd|passwort|pwd|passphrase|secret|token|jwt|cookie|authorization"
    r"|(?:api|access|private|account|shared|encryption|secret)[_-]?key(?:[_-]?id)?)"
)
_LESS_SURE = (
    r"[\w.-]*(?:signature|credentials?)|(?:(?:db|user|my|admin|root|smtp|ftp|sql)[._-]?)?pass|sas|(?:x-)?auth|bearer"
)
"""Names that messages have before a colon, where no secret follows."""
_NO_VALUE = (
    r"(?:(?:none|null|true|false|environment|should|is|must|not|a|an|the)\b|<[\w -]*>)(?=[\"',;)}\]]|[.:]?(?:\s|$))"
    r"|\*\*\*"
)
"""Texts after a name that are not a secret: nothing, a choice, or the words of a message on the setting."""
_AFTER_OPTION = (
    r"(?-i:-{1,2}[a-z])|[|&<>]|\\\n|"
    r"(?:and|are|as|by|can|for|from|has|if|in|needs|of|on|or|takes|that|to|was|which|with)\b[.:,]?(?:\s|$)"
)
"""Texts after an option that are not its value: another option, the end of a command, the words of a message."""
_ASSIGNMENT = re.compile(
    rf"""
    (?P<before> (?<![\w.-]) (?P<quote>["']?)
      (?: (?:{_SECRET}) (?P=quote) (?:\s?=\s?|%3D|:[ \t]+|(?<=["']):)
        | (?:{_LESS_SURE}) (?P=quote) (?:\s?=\s?|%3D|(?<=["']):[ \t]*)
        | (?P<option>-{{1,2}}(?:{_SECRET}|{_LESS_SURE})) (?P=quote) (?:(?<=["']),[ \t]*|(?<!["'])[ \t]+(?:\\\n[ \t]*)?)
      ) (?:b(?=["']))?)
    (?(option)(?!["'](?-i:-{{1,2}}[a-z])))
    (?: "(?P<double>(?:[^"\\]|\\.)+)" | '(?P<single>(?:[^'\\]|\\.)+)'
      | (?!{_NO_VALUE}) (?(option)(?!{_AFTER_OPTION}))
        (?P<plain>(?:(?:bearer|basic|digest|token)[ ]+)?[^\s"',;)}}\]]\S*?) (?=["',;.)}}\]]*(?:\s|$)) )
    """,
    re.IGNORECASE | re.VERBOSE,
)
_SCHEME = re.compile(r"\b(?P<before>bearer |basic )(?P<value>[\w.~+/-]{6,}=*)", re.IGNORECASE)
_KNOWN_FORM = re.compile(
    r"\beyJ[\w-]{8,}\.[\w.-]+|\b(?:gh[oprsu]_|github_pat_|glpat-|hf_|xox[abeprs]-|dapi|sk-)[\w-]{16,}|\bAKIA[0-9A-Z]{16}\b"
)
"""Tokens that are known by how they begin: JSON web tokens, those of code forges, of clouds."""
_USER_OF_OPTION = re.compile(
    r"(?<![\w-])((?:-u|--(?:proxy-)?user)(?:['\"],[ \t]*['\"]|[ =]['\"]?)(?!\d+:)[\w.@+-]+):[^\s'\"]+"
)
_USER = re.compile(r"(?<![\w/.@%])([A-Za-z][\w.+-]*):([^\s:/@'\"]+)@(?=[A-Za-z\[(]|\d+\.\d+\.)")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://\S+")
_AROUND = "'\"`)>],;:."


def hide_secrets(address: str) -> str:
    """Return the address with `***` for its password, the user of a URL, its parameters and its fragment.

    Parameters of harmless names stay, up to the first other one, whose value may go on after it. A text without `://`,
    such as a path, is returned as it is.
    """
    scheme, separator, _ = address.partition("://")
    if not separator:
        return address
    try:
        in_database = scheme.partition("+")[0].lower() in _DATABASES
        shown = _of_database(address) if in_database else _of_url(address)
    except ValueError:  # no port, as where that is a part of a password
        shown = None if "@" in address or _ASSIGNMENT.search(address) or "?" in address else address
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
    """Return the text with `***` for the secrets of the addresses in it, and for other credentials."""
    if "://" in text:
        text = _ADDRESS.sub(_hide_match, text)
    text = _ASSIGNMENT.sub(_hide_value, text)
    text = _SCHEME.sub(_hide_credentials, text)
    text = _KNOWN_FORM.sub(HIDDEN, text)
    text = _USER_OF_OPTION.sub(rf"\1:{HIDDEN}", text)
    return _USER.sub(rf"\1:{HIDDEN}@", text) if "@" in text else text


def redact_values(values: T) -> T:
    """Return nested plain values with every text in them redacted."""
    redacted: Any = values
    if isinstance(values, str):
        redacted = redact(values)
    elif isinstance(values, Mapping):
        redacted = {key: redact_values(value) for key, value in values.items()}
    elif isinstance(values, list | tuple):
        redacted = type(values)(redact_values(value) for value in values)
    return redacted


def _hide_match(match: re.Match[str]) -> str:
    text = match.group()
    address = text.rstrip(_AROUND)
    return hide_secrets(address) + text[len(address) :]


def _hide_value(match: re.Match[str]) -> str:
    quote = '"' if match["double"] is not None else "'" if match["single"] is not None else ""
    return f"{match['before']}{quote}{HIDDEN}{quote}"


def _hide_credentials(match: re.Match[str]) -> str:
    """Hide what follows `Bearer` or `Basic`, unless it is a word of a sentence."""
    value = match["value"]
    if match["before"].lower().startswith("basic"):
        try:
            is_secret = b":" in base64.b64decode(value, validate=True)
        except binascii.Error:
            is_secret = False
    else:
        is_secret = not (value.rstrip(".").isalpha() and value[1:].islower())
    return f"{match['before']}{HIDDEN}" if is_secret else match.group()


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
    shown = _parameters(query)
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
    _ = parts.port  # raises ValueError if it is not a port
    if not in_path_only and (address.count("@") > user_given or re.search(r"\s", address)):
        return None
    query = _parameters(parts.query)
    fragment = _fragment(parts.fragment) if query == parts.query else ""
    if not user_given and (query, fragment) == (parts.query, parts.fragment):
        return address
    netloc = f"{HIDDEN}@{host}" if user_given else host
    return urlunsplit(parts._replace(netloc=netloc, query=query, fragment=fragment))


def _parameters(query: str) -> str:
    """Return the parameters up to the first that may be secret, whose value may go on to the end if not encoded."""
    shown: list[str] = []
    for pair in query.split("&"):
        name, _, value = pair.partition("=")
        harmless = unquote(name).lower() in _HARMLESS and _HARMLESS_VALUE.fullmatch(value)
        if pair and pair != HIDDEN and not harmless:
            return "&".join([*shown, f"{name}={HIDDEN}" if "=" in pair else HIDDEN])
        shown.append(pair)
    return query


def _fragment(fragment: str) -> str:
    """Return a fragment that is the place in a page, such as `/runs?page=2`, else nothing of it."""
    path, mark, query = fragment.partition("?")
    if not fragment or fragment == HIDDEN:
        return fragment
    return f"{path}{mark}{_parameters(query)}" if re.fullmatch(r"/[\w/.-]*", path) else HIDDEN
