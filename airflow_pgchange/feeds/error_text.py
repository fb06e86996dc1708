"""Store the error of an attempt on a batch with its claim, without secrets. People and its dead letter need it."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.errors import PgChangeError
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.feeds.error_translation import shorten
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.feeds.redaction import any_of

LONGEST = 4000
"""How many characters of an error are stored."""
PATIENCE = "5s"
"""The timeout of each statement that stores an error."""

HIDDEN = "***"
SECRETS = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")
"""The options of libpq that are secrets."""
# A text may have been quoted several times, for example by repr, so there may be backslashes before the quotes of a
# value. A value that begins with backslashes and a quote ends at the next quote with exactly as many. In a value that
# begins with a bare quote, a quote after two backslashes belongs to the value if a letter or digit follows.
NAMED = re.compile(
    r"(?i)(\b\w*(?:password|passwd|pwd|secret|token|api_?key)(?:\\{0,16}['\"])?\s*[=:]\s*)"
    r"(?:(?:'(?:[^'\\]|\\.|(?<=\\)'(?=\w))*')+|\"(?:[^\"\\]|\\.|(?<=\\)\"(?=\w))*\""
    r"|(?s:(?P<quote>\\{1,16}+['\"]).*?(?<!\\)(?P=quote))|[^\s,;&'\"]+)"
)
# The scheme is not part of the pattern: in a long text of letters and dots it could begin at every character.
IN_URL = re.compile(r"(://[^\s:/@]*:)[^\s/]*(@)")

log = logging.getLogger(__name__)


def described(error: BaseException, conninfos: Iterable[str] = ()) -> str:
    """Return an error in a few lines, without the passwords of ``conninfos`` and without other texts that look like
    passwords."""
    shorten(error)
    text = "".join(traceback.format_exception_only(error)).strip().replace("\0", "")
    return without_secrets(text.encode("utf-8", "replace").decode("utf-8"), conninfos)


def without_secrets(text: str, conninfos: Iterable[str]) -> str:
    """Return a text without the passwords of ``conninfos``, in any notation, and without other texts that look like
    passwords."""
    secret = any_of(_secrets(conninfos))
    if secret is not None:
        text = secret.sub(HIDDEN, text)
    return IN_URL.sub(rf"\1{HIDDEN}\2", NAMED.sub(rf"\1{HIDDEN}", text))


def note(
    feed: Feed, source: str, batch: Batch, text: str, *, hide: Callable[[str], str], of_batch: bool
) -> None:
    """Store the error of the attempt on ``batch``, and whether the batch itself may have caused it. If that fails, only
    log it, because the task has failed already."""
    shortened = hide(text)[:LONGEST]
    query = feed.note_failure(batch, shortened, of_batch)
    try:
        with connect(source, primary=True) as connection, connection.transaction():
            for setting in ("statement_timeout", "lock_timeout"):
                connection.execute(sql.SQL("set local {} = {}").format(sql.Identifier(setting), PATIENCE))
            ask(connection, query)
    except (PgChangeError, psycopg.Error) as error:
        log.warning("%s: could not store the error of batch %s: %s", feed.name, batch.id, error)


def _secrets(conninfos: Iterable[str]) -> set[str]:
    options: list[dict[str, Any]] = [dict(conninfo_to_dict(conninfo)) for conninfo in conninfos]
    return {str(values[name]) for values in options for name in SECRETS if values.get(name)}
