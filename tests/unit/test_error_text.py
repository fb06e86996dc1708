"""The stored error of an attempt has no secrets."""

from __future__ import annotations

import dataclasses
import html
import inspect
import itertools
import json
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from urllib.parse import quote, quote_plus

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

import airflow_pgchange
from airflow_pgchange.feeds.error_text import described, without_secrets
from airflow_pgchange.plugins.databases import Place

SECRETS = {"conninfo", "dsn", "results", "source", "password", "secret", "_secret", "token"}
"""The names of fields that hold connection strings or credentials."""


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("host=db password=s3cret dbname=x", "host=db password=*** dbname=x"),
        ("password='it''s \\' long' host=db", "password=*** host=db"),
        (repr("host=db password='it\\'s long' x=1"), '"host=db password=*** x=1"'),
        (json.dumps({"told": {"a": "password='two words' x=1"}}), '{"told": {"a": "password=*** x=1"}}'),
        (
            json.dumps('{"password": "two \\"words\\"", "user": 1}'),
            json.dumps('{"password": ***, "user": 1}'),
        ),
        ('{"password": "s3cret", "user": "joe"}', '{"password": ***, "user": "joe"}'),
        ("PGPASSWORD=s3cret psql", "PGPASSWORD=*** psql"),
        ("no access: token=abc.def", "no access: token=***"),
        ("api_key: abc", "api_key: ***"),
        ("cannot reach postgresql://joe:s3c%40ret@db:5432/x", "cannot reach postgresql://joe:***@db:5432/x"),
        ("postgresql://joe@db/x is closed", "postgresql://joe@db/x is closed"),
        ("row 7 is no JSON", "row 7 is no JSON"),
    ],
)
def test_text_that_looks_like_a_secret_is_hidden_and_other_text_is_not(text: str, told: str) -> None:
    assert described(ValueError(text)) == f"ValueError: {told}"


PASSWORDS = (
    "hunter2",
    "p'w d",
    'say "no" twice',
    "a@b/c",
    "back\\slash",
    "end\\\\",
    "tab\tnew\nline",
    "\u00e9 \U0001f600 \u00fc",
    "50% off+",
    "like%5Cthis",
    "&<>;=$`",
)
WAYS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "repr": repr,
    "ascii": ascii,
    "JSON": json.dumps,
    "JSON of any character": lambda secret: json.dumps(secret, ensure_ascii=False),
    "URL": lambda secret: quote(secret, safe=""),
    "URL in small letters": lambda secret: re.sub("%..", lambda found: found[0].lower(), quote(secret)),
    "form": quote_plus,
    "bytes": lambda secret: repr(secret.encode()),
    "libpq": lambda secret: make_conninfo("", password=secret),
    "SQL": lambda secret: sql.Literal(secret).as_string(None),
    "shell": shlex.quote,
    "HTML": html.escape,
}
NESTED = list(WAYS)[:8]
QUOTING = r"\W|\b[bE]\b|\bpassword\b|(?i:%(?:25)*(?:22|27|5c))"
"""Text that may remain around a hidden secret: quotes and backslashes, plain or URL-encoded, and the beginnings of
literals."""


@pytest.mark.parametrize("password", PASSWORDS)
def test_a_password_of_the_connections_is_hidden_however_it_is_written(password: str) -> None:
    conninfo = make_conninfo("", host="db", password=password)
    ways = [*itertools.product(WAYS, ["as it is"]), *itertools.product(NESTED, NESTED), ("bytes", "repr")]
    for inner, outer in ways:
        text = f"got {WAYS[outer](WAYS[inner](password))} there"
        told = without_secrets(text, ["host=other", conninfo])
        assert re.fullmatch(rf"got ({QUOTING})*\*\*\*({QUOTING})* there", told), (inner, outer, told)


@pytest.mark.parametrize("option", ["password", "sslpassword"])
def test_every_option_that_lets_in_is_hidden(option: str) -> None:
    assert without_secrets("it was o@ne", [make_conninfo("", **{option: "o@ne"})]) == "it was ***"


def test_an_error_that_cannot_tell_itself_does_no_harm() -> None:
    assert described(Rude()).endswith("Rude: <exception str() failed>")


def test_characters_that_postgresql_cannot_store_are_left_out() -> None:
    assert described(ValueError("a\0b\ud800c")) == "ValueError: ab?c"


def test_a_text_of_half_a_megabyte_is_told_at_once() -> None:
    """A text of half a megabyte is processed quickly.

    Errors quote the data on which they fail, such as a payload. While the text of an error is made, the process does
    nothing else. The test uses its own process, because an endless regular expression cannot be interrupted. The output
    in the error shows which part was being processed.
    """
    code = r"""
from airflow_pgchange.feeds.error_text import described
known = ["password='a b' sslpassword='\\\\\\\\\\''"]
for part in ("a.", "password", "token='", "://a:", "b"):
    print(part, flush=True)
    assert len(described(ValueError(part * (500_000 // len(part))))) > 250_000, part
for part in ("a", "\\", "a\\", "%5c", "'", "token=\\'", "token='a", "token=\\\\\"a", "password=\\", "a\\\\'"):
    print(part, flush=True)
    assert described(ValueError(part * (500_000 // len(part))), known)
"""
    ran = subprocess.run([sys.executable, "-c", code], timeout=60, check=True, capture_output=True, text=True)
    assert len(ran.stdout.split()) == 15


def test_a_text_loses_the_passwords_of_its_connections_however_they_are_written():
    conninfos = ["host=here password=o@ne sslpassword=o@", "host=there"]
    assert without_secrets("o@ne, o%40ne, o@ or three", conninfos) == "***, ***, *** or three"


def values() -> Iterator[type]:
    """Return the dataclasses of the package."""
    for module in pkgutil.walk_packages(airflow_pgchange.__path__, "airflow_pgchange."):
        for _, one in inspect.getmembers(import_module(module.name), inspect.isclass):
            if one.__module__ == module.name and dataclasses.is_dataclass(one):
                yield one


def test_no_value_shows_a_connection_string_where_it_is_printed() -> None:
    # A Place has only ids of connections.
    shown = {
        f"{one.__qualname__}.{field.name}"
        for one in set(values()) - {Place}
        for field in dataclasses.fields(one)
        if field.name in SECRETS and field.repr and one.__repr__.__code__.co_filename != inspect.getfile(one)
    }
    assert shown == set()
