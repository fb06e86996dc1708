"""What an attempt on a batch failed on: kept with its claim, for people and for its dead letter, without secrets."""

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
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.feeds.secret_text import any_of

LONGEST = 4000
"""Characters of an error that are kept."""
PATIENCE = "5s"
"""How long noting a failure may take the task that failed."""

HIDDEN = "***"
SECRETS = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")
"""The options of libpq that let in."""
# A quotation ends with the quote that it began with, behind as many backslashes. Where it was quoted again, as repr does,
# two backslashes escape a quote, and a word goes on behind it.
NAMED = re.compile(
    r"(?i)(\b\w*(?:password|passwd|pwd|secret|token|api_?key)(?:\\{0,16}['\"])?\s*[=:]\s*)"
    r"(?:(?:'(?:[^'\\]|\\.|(?<=\\)'(?=\w))*')+|\"(?:[^\"\\]|\\.|(?<=\\)\"(?=\w))*\""
    r"|(?s:(?P<quote>\\{1,16}+['\"]).*?(?<!\\)(?P=quote))|[^\s,;&'\"]+)"
)
# Without the scheme before it: in a long text of letters and dots one could begin at each.
IN_URL = re.compile(r"(://[^\s:/@]*:)[^\s/]*(@)")

log = logging.getLogger(__name__)


def described(error: BaseException, conninfos: Iterable[str] = ()) -> str:
    """An error in a few lines, without the passwords of ``conninfos`` and without what looks like one."""
    text = "".join(traceback.format_exception_only(error)).strip().replace("\0", "")
    return without_secrets(text.encode("utf-8", "replace").decode("utf-8"), conninfos)


def without_secrets(text: str, conninfos: Iterable[str]) -> str:
    """A text without the passwords of ``conninfos``, however they are written, and without what looks like one."""
    known = any_of(_secrets(conninfos))
    if known is not None:
        text = known.sub(HIDDEN, text)
    return IN_URL.sub(rf"\1{HIDDEN}\2", NAMED.sub(rf"\1{HIDDEN}", text))


def note(feed: Feed, source: str, batch: Batch, text: str, hide: Callable[[str], str]) -> None:
    """Keep what the attempt on ``batch`` failed on. What cannot be kept is logged: the task has failed already."""
    kept = hide(text)[:LONGEST]
    try:
        with connect(source, primary=True) as connection, connection.transaction():
            for setting in ("statement_timeout", "lock_timeout"):
                connection.execute(sql.SQL("set local {} = {}").format(sql.Identifier(setting), PATIENCE))
            ask(connection, feed.note_failure(batch, kept))
    except (PgChangeError, psycopg.Error) as error:
        log.warning("%s: what batch %s failed on could not be noted: %s", feed.name, batch.id, error)


def _secrets(conninfos: Iterable[str]) -> set[str]:
    options: list[dict[str, Any]] = [dict(conninfo_to_dict(conninfo)) for conninfo in conninfos]
    return {str(given[name]) for given in options for name in SECRETS if given.get(name)}
