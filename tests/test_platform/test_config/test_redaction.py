"""No way to write a password into an address gets it past the redaction, and other texts stay as they are."""

from __future__ import annotations

import time
from itertools import product
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.platform.config.redaction import check_address, has_hidden, hide_secrets, redact, redact_values
from narrowcast.platform.errors import UserError

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
        *("http://127.0.0.1:5000", "https://[::1]:5000/a?page=2#/d", "postgresql://host/x?sslmode=require"),
        *("s3://bucket/a@b/c", "file:///home/a@b", "databricks://profile", "databricks", "mysql://alice@host:3306/x"),
        *("set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN", "(see https://sqlalche.me/e/20/e3q8)", "test.hr@10=0.4"),
    ],
)
def test_what_holds_no_secret_stays_as_it_is(text: str) -> None:
    assert hide_secrets(text) == text
    assert redact(text) == text
    check_address(text, "tracking.uri")


J = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJRejcifQ.Qz7Qz7Qz7Qz7"
B = "YWxpY2U6UXo3"  # alice:Qz7


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        # addresses: parameters of any name that is not known to be harmless
        ("mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3BPWD%3DQz7", "mssql+pyodbc:///?odbc_connect=***"),
        ("mssql+pyodbc://h/d?driver=ODBC+Driver+18&pass=Qz7", "mssql+pyodbc://h/d?driver=ODBC+Driver+18&pass=***"),
        ("https://h/x?pass=Qz7", "https://h/x?pass=***"),
        ("https://h/x?jwt=Qz7", "https://h/x?jwt=***"),
        ("https://h/x?authorization=Qz7", "https://h/x?authorization=***"),
        ("https://h/x?bearer=Qz7", "https://h/x?bearer=***"),
        ("https://h/x?sas=Qz7", "https://h/x?sas=***"),
        ("https://h/x?my-secret-name=Qz7", "https://h/x?my-secret-name=***"),
        ("https://h/x?code=Qz7", "https://h/x?code=***"),
        ("https://h/x?sv=2024&sig=Qz7", "https://h/x?sv=***"),
        ("https://h/x?Qz7", "https://h/x?***"),
        ("https://h/x?timeout=5&Qz7=1", "https://h/x?timeout=5&Qz7=***"),
        ("https://h/x?timeout=5&k=Qz7&sslmode=a", "https://h/x?timeout=5&k=***"),
        ("https://h/x?%70assword=Qz7", "https://h/x?%70assword=***"),
        ("https://h/x?PAGE=2&P=Qz7", "https://h/x?PAGE=2&P=***"),
        ("https://h/x?page=(Qz7", "https://h/x?page=***"),
        ("https://h/x#access_token=Qz7", "https://h/x#***"),
        ("https://h/x#Qz7", "https://h/x#***"),
        ("https://h/#/runs?token=Qz7", "https://h/#/runs?token=***"),
        ("postgresql://h/x?passfile=/x&user=a", "postgresql://h/x?passfile=***"),
        ("postgresql://h/x?options=-cQz7", "postgresql://h/x?options=***"),
        ("mysql://a:Qz7@h/x?charset=utf8", "mysql://a:***@h/x?charset=utf8"),
        ("https://Qz7@github.com/a/b", "https://***@github.com/a/b"),
        ("https://x:Qz7@h", "https://***@h"),
        ("git+https://Qz7@h/x.git", "git+https://***@h/x.git"),
        ("redis://:Qz7@h:6379/0", "redis://***@h:6379/0"),
        ("amqp://a:Qz7@h//", "amqp://***@h//"),
        ("mongodb+srv://a:Qz7@h/?w=majority", "mongodb+srv://***@h/?w=***"),
        ("azure://h/x?se=2&sp=r&sig=Qz7", "azure://h/x?se=***"),
        ("s3://b/x?X-Amz-Signature=Qz7", "s3://b/x?X-Amz-Signature=***"),
        ("see http://a:Qz7@h/x, or https://h?k=Qz7.", "see http://***@h/x, or https://h?k=***."),
        ("jdbc:postgresql://h/d?user=a&password=Qz7", "jdbc:postgresql://h/d?user=a&password=***"),
        # assignments
        ("password=Qz7", "password=***"),
        ("password = Qz7", "password = ***"),
        ("password: Qz7", "password: ***"),
        ("  db_password: Qz7", "  db_password: ***"),
        ("{'password': 'Qz7'}", "{'password': '***'}"),
        ('{"password": "Qz7"}', '{"password": "***"}'),
        ('{"password":"Qz7"}', '{"password":"***"}'),
        ("{'password': b'Qz7'}", "{'password': b'***'}"),
        (r"{'password': 'a\'Qz7'}", "{'password': '***'}"),
        ("password='a b Qz7'", "password='***'"),
        ('PASSWORD="Qz7"', 'PASSWORD="***"'),
        ("f(user='a', password='Qz7')", "f(user='a', password='***')"),
        ("connect(password=Qz7)", "connect(password=***)"),
        ("host=h password=Qz7 port=1", "host=h password=*** port=1"),
        ("host=h password=Qz7&Qz7 port=1", "host=h password=*** port=1"),
        ("password=x)Qz7", "password=***"),
        ("pwd=Qz7;", "pwd=***;"),
        ("DRIVER=X;UID=a;PWD=Qz7", "DRIVER=X;UID=a;PWD=***"),
        ("DRIVER%3DX%3BPWD%3DQz7", "DRIVER%3DX%3BPWD%3D***"),
        ("passwd=Qz7", "passwd=***"),
        ("pass=Qz7", "pass=***"),
        ("DB_PASS=Qz7", "DB_PASS=***"),
        ("'pass': 'Qz7'", "'pass': '***'"),
        ("passphrase: Qz7", "passphrase: ***"),
        ("secret=Qz7", "secret=***"),
        ("client_secret: Qz7", "client_secret: ***"),
        ("AWS_SECRET_ACCESS_KEY=Qz7", "AWS_SECRET_ACCESS_KEY=***"),
        ("aws_access_key_id = Qz7", "aws_access_key_id = ***"),
        ("api_key: Qz7", "api_key: ***"),
        ("apikey=Qz7", "apikey=***"),
        ("api-key=Qz7", "api-key=***"),
        ("AccountKey=Qz7;", "AccountKey=***;"),
        ("private_key=Qz7", "private_key=***"),
        ("token=Qz7", "token=***"),
        ("token: Qz7", "token: ***"),
        ("MLFLOW_TRACKING_TOKEN=Qz7", "MLFLOW_TRACKING_TOKEN=***"),
        ("x-auth-token: Qz7", "x-auth-token: ***"),
        ("jwt=Qz7", "jwt=***"),
        ("sas=Qz7", "sas=***"),
        ("signature=Qz7", "signature=***"),
        ("credential='Qz7'", "credential='***'"),
        ("cookie: Qz7", "cookie: ***"),
        ("auth=Qz7", "auth=***"),
        # values that begin as the words of a message do
        *(
            (f"password={word}Qz7", "password=***")
            for word in ("not-", "a.", "The-", "null/", "is@", "<", "an:", "<a>")
        ),
        ("Cookie: a=Qz7; b", "Cookie: ***; b"),
        # options of a command line, and lists of its words
        ("--password Qz7", "--password ***"),
        ("--password=Qz7 --host h", "--password=*** --host h"),
        ("--token=Qz7", "--token=***"),
        ("--token Qz7 --host h", "--token *** --host h"),
        ("mysqldump -h h --password\tQz7 d", "mysqldump -h h --password\t*** d"),
        ("--db-password 'a b Qz7' x", "--db-password '***' x"),
        ('--password "a b Qz7" x', '--password "***" x'),
        ("keytool -storepass-secret Qz7", "keytool -storepass-secret ***"),
        ("java -password Qz7", "java -password ***"),
        ("aws --secret-access-key Qz7", "aws --secret-access-key ***"),
        ("--api-key Qz7, --x", "--api-key ***, --x"),
        ("--access_token Qz7", "--access_token ***"),
        ("--pass Qz7", "--pass ***"),
        ("--auth Qz7", "--auth ***"),
        ("--credentials Qz7", "--credentials ***"),
        ("--PASSWORD Qz7", "--PASSWORD ***"),
        ("--password -Qz7", "--password ***"),
        ("--password is-Qz7", "--password ***"),
        ("--password to-Qz7", "--password ***"),
        ("--password 7", "--password ***"),
        ("x --password \\\n  Qz7 \\\n  --host h", "x --password \\\n  *** \\\n  --host h"),
        ("(narrowcast x --token Qz7)", "(narrowcast x --token ***)"),
        ("sh -c 'x --token Qz7'", "sh -c 'x --token ***'"),
        ("Command '['x', '--password', 'Qz7', '-v']' died", "Command '['x', '--password', '***', '-v']' died"),
        ('["x", "--token", "Qz7"]', '["x", "--token", "***"]'),
        ('["x","--token","Qz7"]', '["x","--token","***"]'),
        ("['--password', b'Qz7']", "['--password', b'***']"),
        ("['--password=Qz7', 'x']", "['--password=***', 'x']"),
        ("curl -u alice:Qz7 h/x", "curl -u alice:*** h/x"),
        ("curl --user alice:Qz7 h", "curl --user alice:*** h"),
        ("curl --user=alice:Qz7 h", "curl --user=alice:*** h"),
        ("curl -u 'alice:Qz7' h", "curl -u 'alice:***' h"),
        ("['curl', '-u', 'alice:Qz7', 'h']", "['curl', '-u', 'alice:***', 'h']"),
        # schemes of authorization, users, and tokens that are known by how they begin
        ("Authorization: Bearer Qz7", "Authorization: ***"),
        ("Authorization: Basic Qz7", "Authorization: ***"),
        ("authorization=Qz7", "authorization=***"),
        ("{'Authorization': 'Bearer Qz7'}", "{'Authorization': '***'}"),
        ("-H 'Authorization: token Qz7'", "-H 'Authorization: ***'"),
        ("sent Bearer Qz7Qz7Qz7.", "sent Bearer ***"),
        (f"got Basic {B}", "got Basic ***"),
        (f"the token {J} is old", "the token *** is old"),
        ("ghp_Qz7Qz7Qz7Qz7Qz7Qz7", "***"),
        ("hf_Qz7Qz7Qz7Qz7Qz7Qz7 of the hub", "*** of the hub"),
        ("alice:Qz7@host.example:5432", "alice:***@host.example:5432"),
        ("alice:Qz7@127.0.0.1", "alice:***@127.0.0.1"),
        ("root:Qz7@tcp(host:3306)/db", "root:***@tcp(host:3306)/db"),
    ],
)
def test_a_secret_is_hidden_in_every_spelling(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown
    if "://" in text and " " not in text and "jdbc" not in text:
        assert hide_secrets(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        # addresses
        *("http://127.0.0.1:5000/#/experiments/1/runs?workflowType=machine_learning", "https://h/x?page=2&limit=10"),
        *("sqlite:///runs/mlflow.db?mode=ro&uri=true", "postgresql://alice@h:5432/x?connect_timeout=5&sslmode=require"),
        *("mysql+pymysql://h/x?charset=utf8mb4", "mssql+pyodbc://h/x?driver=ODBC+Driver+18+for+SQL+Server"),
        *(
            "https://h/api/2.0/mlflow/runs/get?run_id=0af3",
            "http://h:8265/api/jobs/?detail=true",
            "https://h/a.csv?raw=true",
        ),
        *("s3://bucket/a?versionId=x1&region=eu-1", "file:///home/a/x.yaml", "https://arxiv.org/abs/1602.05629v4"),
        # names without values, and other names
        *(
            "password=",
            "password: ",
            "'password': ''",
            "{'password': None}",
            "token=None",
            "password: null",
            "secret: <hidden>",
            "f(password=None,user=x)",
            "password=<your password>",
        ),
        *(
            "tracking.credentials=environment",
            "credentials: environment",
            "tokens=80",
            "max_tokens: 5",
            "token_column: words",
        ),
        *(
            "tokenizer=words",
            "passes=3",
            "first_pass=2",
            "compass: 3",
            "texas=1",
            "keyword=a",
            "key=3",
            "code=2",
            "PATH=/bin",
        ),
        *(
            "mlflow.secret: should be a mapping",
            "the token is wrong",
            "password is unknown; known here: name",
            "author: me",
        ),
        *("no token: the cluster asks for one", "signature: (x, y)", "pass: 3 of 4", "monkey: 1", "keys: a, b"),
        # options without a secret, and words on options
        *("--password --host h", "--no-password -v", "--token-file x", "--password-file x", "--tokens 80", "--key 3"),
        *("--token is needed", "give --token to use it", "--password or --token", "--password, which is old"),
        *("--token <token>", "--password", "give it by --token.", "['--password', '--host']", "--ask-password | x"),
        *(
            "narrowcast sync --tracking-uri http://h",
            "run my-token x",
            "a-password is x",
            "-u alice h",
            "docker run -u 1000:100",
        ),
        # names of metrics, kinds, files and words of sentences
        *(
            "validation.hr@10 = 0.41",
            "hr@10: 0.4, ndcg@10: 0.2",
            "best:hr@10",
            "kind: my_token:Token",
            "algorithm: secret_sum",
        ),
        *(
            "Basic iterative thresholding",
            "basic examples of it",
            "the bearer shares",
            "bearer authentication",
            "a@b.org",
        ),
        *("runs/fedavg-2:a", "12:30:15", "C:\\runs\\a", "git@github.com:a/b.git", "0x5eyJ", "sk-learn", "sha256:0a1b"),
    ],
)
def test_what_is_no_secret_stays_readable(text: str) -> None:
    assert redact(text) == text
    assert hide_secrets(text) == text


@pytest.mark.slow
def test_a_long_text_is_read_in_time() -> None:
    began = time.monotonic()
    for piece in (
        "a.",
        "a-b",
        "--",
        "-u a",
        "--token ",
        "'--token', ",
        "password",
        "'",
        "x:",
        "Bearer a",
        "eyJ",
        "a:b@",
        "token: ",
        "http://",
    ):
        redact(piece * (100_000 // len(piece)))
    assert time.monotonic() - began < 60


def test_values_are_redacted_however_deep_they_are() -> None:
    deep = {"a": [{"uri": "http://x:Qz7@host"}], "b": ("connect password=Qz7 host=h", 1.5, None), "c": True}
    assert redact_values(deep) == {
        "a": [{"uri": "http://***@host"}],
        "b": ("connect password=*** host=h", 1.5, None),
        "c": True,
    }


@pytest.mark.slow
@given(st.text(max_size=60), st.sampled_from(["", "http://", "postgresql://", "s3://", "x://"]))
def test_any_text_is_taken(text: str, scheme: str) -> None:
    once = hide_secrets(scheme + text)
    assert hide_secrets(once) == once
    redact(scheme + text)
