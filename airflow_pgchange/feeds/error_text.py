"""What an attempt on a batch failed on: kept with its claim, for people and for its dead letter, without secrets."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.connect import connect
from airflow_pgchange.feeds.errors import PgChangeError
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.queries import ask

LONGEST = 4000
"""Characters of an error that are kept."""
PATIENCE = "5s"
"""How long noting a failure may take the task that failed."""

HIDDEN = "***"
NAMED = re.compile(
    r"(?i)(\b\w*(?:password|passwd|pwd|secret|token|api_?key)['\"]?\s*[=:]\s*)"
    r"((?:'(?:[^'\\]|\\.)*')+|\"(?:[^\"\\]|\\.)*\"|[^\s,;&'\"]+)"
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
    for secret in sorted(_secrets(conninfos), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
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
    plain = {str(given[name]) for given in options for name in ("password", "sslpassword") if given.get(name)}
    return plain | {quote(secret, safe="") for secret in plain}
