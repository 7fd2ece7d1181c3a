"""No way to write a password into an address gets it past the redaction, and other texts stay as they are."""

from __future__ import annotations

from itertools import product
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.platform.errors import UserError
from narrowcast.platform.redaction import check_address, has_hidden, hide_secrets, redact, redact_values

SECRET = "Qz7"  # on both sides of what may break it in two
MIDDLES = (
    "",
    "/",
    "#",
    "?",
    "@",
    ":",
    "%",
    "&",
    "=",
    ";",
    "+",
    "//",
    "/@",
    "1/",
    ":1@",
    "?a=",
    "#@",
    "'",
    '"',
    "[",
    "\\",
)
HEADS = ("", "1")  # a part of a password that may be taken for a port
SCHEMES = ("http", "https", "postgresql", "postgresql+psycopg", "mysql", "mssql+pyodbc", "s3", "mongodb", "redis")
PLACES = (
    "{scheme}://alice:{password}@host.example:5000/path",
    "{scheme}://alice:{password}@host.example",
    "{scheme}://alice:{password}@[::1]:5000/path?sslmode=require",
    "{scheme}://host.example/path?user=alice&password={password}",
    "{scheme}://host.example/path?sslmode=require&access_token={password}&x=1",
    "{scheme}://alice@host.example/path?passwd={password}",
    "{scheme}://host.example/path?X-Amz-Credential={password}&X-Amz-Signature={password}",
)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("encoded", [True, False])
def test_a_password_is_hidden_wherever_it_is_and_however_it_is_written(scheme: str, *, encoded: bool) -> None:
    for place, middle, head in product(PLACES, MIDDLES, HEADS):
        raw = f"{head}{SECRET}{middle}{SECRET}"
        address = place.format(scheme=scheme, password=quote(raw, safe="") if encoded else raw)
        shown = hide_secrets(address)
        assert SECRET not in shown, address
        assert has_hidden(shown)
        assert hide_secrets(shown) == shown
        assert SECRET not in redact(f"no store at {address} ({address!r}: refused); start it"), address
        if encoded:
            check_address(address, "tracking.uri")
            assert "host.example" in shown or "[::1]" in shown


def test_the_user_of_a_url_may_be_a_token_and_that_of_a_database_is_a_name() -> None:
    assert hide_secrets("https://Qz7@host/x") == "https://***@host/x"
    assert hide_secrets("postgresql://alice@host/x") == "postgresql://alice@host/x"
    assert hide_secrets("postgresql://alice:Qz7@host/x") == "postgresql://alice:***@host/x"
    assert hide_secrets("sqlite+pysqlcipher://:Qz7@/x.db") == "sqlite+pysqlcipher://:***@/x.db"


@pytest.mark.parametrize(
    "address",
    [
        *("http://alice:a/b@host", "http://alice:a@b@host", "http://alice:1/b@host", "https://alice:a#b@host"),
        *("postgresql://alice:a@b@host/x", "postgresql://alice:a@b/c@host/x", "s3://key:a/b@bucket"),
    ],
)
def test_an_address_with_two_readings_is_refused_with_the_cure(address: str) -> None:
    with pytest.raises(UserError, match=r"tracking.uri = \w+://\*\*\* is not a valid address; percent-encode .* @ %40"):
        check_address(address, "tracking.uri")


@pytest.mark.parametrize(
    "text",
    [
        *("", "runs", "/home/a@b/runs", "sqlite:////home/a@b/mlflow.db", "sqlite:///my runs/x.db", "sqlite://"),
        *("http://127.0.0.1:5000", "https://[::1]:5000/a?b=c#d", "postgresql://host/x?sslmode=require"),
        *("s3://bucket/a@b/c", "file:///home/a@b", "databricks://profile", "databricks", "mysql://alice@host:3306/x"),
        *("set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN", "(see https://sqlalche.me/e/20/e3q8)", "test.hr@10=0.4"),
    ],
)
def test_what_holds_no_secret_stays_as_it_is(text: str) -> None:
    assert hide_secrets(text) == text
    assert redact(text) == text
    check_address(text, "tracking.uri")


def test_values_are_redacted_however_deep_they_are() -> None:
    deep = {"a": [{"uri": "http://x:Qz7@host"}], "b": ("connect password=Qz7 host=h", 1.5, None), "c": True}
    assert redact_values(deep) == {
        "a": [{"uri": "http://***@host"}],
        "b": ("connect password=*** host=h", 1.5, None),
        "c": True,
    }


@given(st.text(max_size=60), st.sampled_from(["", "http://", "postgresql://", "s3://", "x://"]))
def test_any_text_is_taken(text: str, scheme: str) -> None:
    once = hide_secrets(scheme + text)
    assert hide_secrets(once) == once
    redact(scheme + text)
